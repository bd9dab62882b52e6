"""The flags that describe a model, in Megatron-LM's spelling."""

from __future__ import annotations

from typing import Any, ClassVar

from costmodels.catalogue import model_names
from costmodels.catalogue.yaml_files import build, is_file_name
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from costmodels.spelling import or_nearest
from planner.inputs.model import is_hf_config, is_hub_id, resolve_model
from planner.options.experts import ExpertFlags, LatentFlags, expert_changes, latent_changes
from planner.options.flags import flag
from planner.options.limits import AT_LEAST_1, Bounds
from planner.options.lora import LoraFlags, lora_note
from planner.options.mtp import MtpFlags, mtp_note

DEFAULT_MODEL = "gpt-22b"
"""Model that is assumed when none is given: the GPT of 22 billion parameters of PAI's guide."""

DEFAULT_VOCAB = 50257
"""Vocabulary that is assumed for a model given by its dimensions: GPT-2's."""

_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


@dataclass(frozen=True)
class Dimensions:
    """Sizes and choices of a model."""

    SECTIONS: ClassVar[dict[str, str]] = {"model": "Model"}

    model: str | None = flag(
        None,
        "Catalogue name, id on the Hugging Face Hub, or path of a config.json or a YAML file.",
        values=model_names,
    )
    num_layers: int | None = flag(None, "Transformer layers.")
    hidden_size: int | None = flag(None, "Width of the residual stream.")
    ffn_hidden_size: int | None = flag(
        None, "Inner width of the MLP; 4 x hidden size unless given, 8/3 x with --swiglu (in steps of 64)."
    )
    num_attention_heads: int | None = flag(None, "Attention heads.")
    kv_channels: int | None = flag(None, "Width of one head; hidden size / heads unless given.")
    group_query_attention: bool = flag(False, "Use grouped-query attention.")
    num_query_groups: int | None = flag(
        None, "Key/value heads of grouped-query attention.", within=AT_LEAST_1
    )
    seq_length: int | None = flag(None, "Tokens of one training sample.")
    max_position_embeddings: int | None = flag(None, "Longest sequence; rows of a learned position table.")
    position_embedding_type: str | None = flag(None, "learned_absolute, rope or none.")
    use_rotary_position_embeddings: bool = flag(False, "Short for --position-embedding-type rope.")
    no_position_embedding: bool = flag(False, "No table of positions; goes with rope or none.")
    rotary_base: float | None = flag(
        None, "Base of the rotary embedding.", within=Bounds("at least 1, such as 10000", 1)
    )
    normalization: str | None = flag(None, "LayerNorm or RMSNorm.")
    norm_epsilon: float | None = flag(None, "Epsilon of the norms.", within=Bounds("positive", 1e-30, 1))
    swiglu: bool = flag(False, "Gated MLP with SiLU.")
    squared_relu: bool = flag(False, "MLP with squared ReLU.")
    disable_bias_linear: bool = flag(False, "No biases on the linear layers.")
    add_qkv_bias: bool = flag(False, "Biases on query, key and value even without other biases.")
    qk_layernorm: bool = flag(False, "Norms on queries and keys.")
    untie_embeddings_and_output_weights: bool = flag(False, "An output head of its own.")
    vocab_size: int | None = flag(None, "Entries of the tokenizer, before padding.")


@dataclass(frozen=True)
class ModelOptions(LoraFlags, MtpFlags, LatentFlags, ExpertFlags, Dimensions):
    """The model to train: a named model, a model by its dimensions, or a named model with changed
    dimensions."""

    def spec(self) -> ModelSpec:
        """The model; raises `InputError` for an unknown one, missing dimensions or values that clash."""
        spec = self._described()
        if self.rotary_base is not None and spec.position != "rope":
            raise InputError(
                f"--rotary-base {self.rotary_base:g}: {spec.name} has no rotary positions; add "
                "--position-embedding-type rope or leave it out"
            )
        if self.no_position_embedding and spec.position == "learned":
            raise InputError(
                f"--no-position-embedding: {spec.name} learns a table of positions; add "
                "--position-embedding-type rope or none"
            )
        return self.with_lora(self.with_mtp(spec))

    def _described(self) -> ModelSpec:
        changes = self._changes()
        if self.model is None and {"layers", "hidden", "heads"} & changes.keys():
            return self._from_dimensions(changes)
        if self.model is not None and not self.model.strip():
            raise InputError(
                "--model is empty; give a name (see `planner models`), an id, a config.json or a YAML file"
            )
        base = self.named_model(self.model or DEFAULT_MODEL, changes.pop("seq", None))
        changes |= expert_changes(self, base, changes.get("layers", base.layers))
        changes |= latent_changes(self, base, changes.get("heads", base.heads))
        return self._changed(base, changes) if changes else base

    def named_model(self, name: str, seq: int | None) -> ModelSpec:
        """The model of a name or file, with sequences of `seq` tokens if `seq` is given."""
        return resolve_model(name, seq)

    def is_described(self, name: str) -> bool:
        """Return whether a model comes from a description without the length of training samples."""
        return is_file_name(name) or is_hf_config(name) or is_hub_id(name)

    def notes(self) -> list[str]:
        """Assumptions about values that no flag gives."""
        notes = self._assumed()
        if self.multi_latent_attention and not self.qk_layernorm:
            notes.append("latent attention normalises its latents (Megatron-LM: with --qk-layernorm only)")
        if self.mtp_num_layers is not None:
            notes.append(mtp_note(self.spec()))
        return notes if self.lora_rank is None else [*notes, lora_note(self.spec())]

    def _assumed(self) -> list[str]:
        if self.model is not None:
            if self.seq_length is not None or not self.is_described(self.model):
                return []
            spec = self.spec()
            return [f"sequence length {spec.seq} of at most {spec.max_positions} (no --seq-length given)"]
        if self.num_layers is None:
            return [f"no model given: {DEFAULT_MODEL} (the GPT of PAI's guide)"]
        return [] if self.vocab_size else [f"no --vocab-size given: {DEFAULT_VOCAB} (GPT-2)"]

    def _changes(self) -> dict[str, Any]:
        """Fields of `ModelSpec` that a flag sets."""
        given: dict[str, Any] = {
            "layers": self.num_layers,
            "hidden": self.hidden_size,
            "ffn": self.ffn_hidden_size,
            "heads": self.num_attention_heads,
            "head_dim": self.kv_channels,
            "kv_heads": self._query_groups(),
            "seq": self.seq_length,
            "max_positions": self.max_position_embeddings,
            "position": self._position(),
            "rope_theta": self.rotary_base,
            "norm": choice("--normalization", self.normalization, _NORMS),
            "norm_eps": self.norm_epsilon,
            "vocab": self.vocab_size,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        if self.swiglu and self.squared_relu:
            raise InputError("--swiglu and --squared-relu contradict each other; give one")
        if self.swiglu:
            changes |= {"gated": True, "activation": "silu"}
        if self.squared_relu:
            changes |= {"gated": False, "activation": "relu2"}
        if self.disable_bias_linear:
            changes["linear_bias"] = False
        if self.add_qkv_bias:
            changes["qkv_bias"] = True
        if self.qk_layernorm:
            changes["qk_norm"] = True
        if self.untie_embeddings_and_output_weights:
            changes["tied"] = False
        return changes

    def _position(self) -> str | None:
        position = choice("--position-embedding-type", self.position_embedding_type, _POSITIONS)
        if self.use_rotary_position_embeddings and position not in (None, "rope"):
            raise InputError(
                f"--use-rotary-position-embeddings and --position-embedding-type "
                f"{self.position_embedding_type} contradict each other; give one"
            )
        return "rope" if self.use_rotary_position_embeddings else position

    def _query_groups(self) -> int | None:
        if self.group_query_attention:
            return self.num_query_groups or 1  # Megatron's default is one group.
        if self.num_query_groups is not None:
            raise InputError(f"--num-query-groups {self.num_query_groups} needs --group-query-attention")
        return None

    def _from_dimensions(self, changes: dict[str, Any]) -> ModelSpec:
        changes.setdefault("seq", self.max_position_embeddings)
        flags = {
            "layers": "--num-layers",
            "hidden": "--hidden-size",
            "heads": "--num-attention-heads",
            "seq": "--seq-length",
        }
        missing = [name for field, name in flags.items() if changes.get(field) is None]
        if missing:
            raise InputError(
                f"a model by its dimensions also needs {', '.join(missing)} (or give --model NAME)"
            )
        changes |= expert_changes(self, None, changes["layers"])
        changes |= latent_changes(self, None, changes["heads"])
        changes.setdefault("ffn", _usual_ffn(changes["hidden"], self.swiglu))
        changes.setdefault("vocab", DEFAULT_VOCAB)
        name = f"gpt-{changes['layers']}x{changes['hidden']}"
        return self._built({"name": name} | changes, "model")

    def _changed(self, base: ModelSpec, changes: dict[str, Any]) -> ModelSpec:
        """`base` with the fields that flags set; sizes that depend on a changed width are derived again."""
        values = base.model_dump(exclude={"published_parameters", "source"}) | _widths(base, changes)
        resized = {"hidden", "heads"} & changes.keys() and base.latent_attention is None
        if resized and "head_dim" not in changes:
            values.pop("head_dim")
        if "heads" in changes and base.kv_heads == base.heads:
            values.pop("kv_heads")
        if base.seq > changes.get("max_positions", base.max_positions):
            raise InputError(
                f"--seq-length {base.seq} is longer than --max-position-embeddings {changes['max_positions']}"
            )
        if changes.get("position", base.position) != "rope":
            values["rope_scaling"] = None
        if not base.experts:  # Their sizes, zero in a dense model, are the defaults again.
            values = {name: value for name, value in values.items() if name not in ("top_k", "expert_ffn")}
        name = f"{base.name} (changed)"
        return self._built(values | changes | {"name": name}, f"model {name}")

    def _built(self, values: dict[str, Any], origin: str) -> ModelSpec:
        """The model of `values`, with the documented defaults of the flags of experts."""
        if values.get("experts"):
            values = {"top_k": 2, "expert_ffn": values["ffn"]} | values
        if values.get("latent_attention"):
            # Megatron-LM's norms of queries and keys are then those of the latents, which are always there.
            values = values | {"qk_norm": False}
            self._check_latent(values)
        return build(ModelSpec, values, origin)

    def _check_latent(self, values: dict[str, Any]) -> None:
        for given, name in ((self.kv_channels, "kv-channels"), (self.num_query_groups, "num-query-groups")):
            if given is not None:
                raise InputError(
                    f"--{name} {given}: heads of latent attention have the widths of --qk-head-dim, "
                    "--qk-pos-emb-head-dim and --v-head-dim, and keys of their own; leave it out"
                )
        if values.get("position", "learned") != "rope":
            raise InputError("--multi-latent-attention needs --position-embedding-type rope")


def _widths(base: ModelSpec, changes: dict[str, Any]) -> dict[str, Any]:
    """Inner widths of `base` that depend on `changes`.

    Raises `InputError` where a width cannot be derived, and where no layer has the given width.
    """
    hidden, gated = changes.get("hidden", base.hidden), changes.get("gated", base.gated)
    # Experts as wide as the dense MLP stay so; where all layers have others, nothing is that wide.
    follow = base.experts > 0 and base.expert_ffn == base.ffn
    some_dense = not changes.get("experts", base.experts) or changes.get("dense_layers", base.dense_layers)
    unused = base.experts > 0 and not follow and not some_dense
    if "ffn" in changes and unused and "expert_ffn" not in changes:
        raise InputError(
            f"--ffn-hidden-size {changes['ffn']}: all layers of {base.name} have experts, which are "
            f"{base.expert_ffn} wide; give --moe-ffn-hidden-size"
        )
    ffn = changes.get("ffn")
    if ffn is None and (hidden, gated) != (base.hidden, base.gated) and not unused:
        if base.ffn != _usual_ffn(base.hidden, base.gated):
            gate = "--swiglu" if gated else "--squared-relu"
            flag_text = f"--hidden-size {hidden}" if hidden != base.hidden else gate
            raise InputError(
                f"{flag_text} changes {base.name}, whose MLP is {base.ffn} wide: give --ffn-hidden-size too"
            )
        ffn = _usual_ffn(hidden, gated)
    if ffn is None:
        return {}
    return {"ffn": ffn} | ({"expert_ffn": ffn} if follow else {})


def _usual_ffn(hidden: int, gated: bool) -> int:
    """Width of the MLP that Megatron-LM assumes (arguments.py `validate_args`).

    It is four times the residual width. A gated MLP has two thirds of that, rounded down to a multiple of 64,
    so its three matrices hold as much as two.
    """
    return int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden


def choice(name: str, value: str | None, choices: dict[str, str]) -> str | None:
    """The value that a flag's word stands for; None where the flag was not given."""
    if value is None:
        return None
    if value not in choices:
        raise InputError(f"{name} {value}: expected {', '.join(choices)}{or_nearest(value, choices)}")
    return choices[value]
