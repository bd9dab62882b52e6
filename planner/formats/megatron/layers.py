"""Kinds of attention, positions, norms and activations as flags of Megatron-LM, written and read.

The flags are those of August 2026 (megatron/training/arguments.py and
megatron/core/transformer/transformer_config.py, commit d98e8a64dd). MindSpeed is built on a release (core
0.12) that only has the flags in `MINDSPEEDS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import Indexer, LinearAttention, RopeScaling
from planner.formats.facts.flag_catalogue import GivenFlag
from planner.formats.facts.reading import Problems
from planner.formats.writing.model_words import Said
from planner.options.experts import list_of_layers

Flags = dict[str, str]

LLAMA3 = RopeScaling(kind="llama3", original_positions=8192)
"""The scaling of `--use-rope-scaling`, except for its factor (rotary_pos_embedding.py, `_apply_scaling`)."""

YARN_OF_LATENTS = RopeScaling(kind="yarn", original_positions=4096)
"""The YaRN of latent attention, except for the values that flags give (`MLATransformerConfig`)."""

OF_LATENTS = {
    "--original-max-position-embeddings": "original_positions",
    "--beta-fast": "beta_fast",
    "--beta-slow": "beta_slow",
}
"""Fields of `MLATransformerConfig` that have no flag, as the flags that they would be; Megatron-Bridge sets
them."""

SCALED, FACTOR = "--rope-scaling-type", "--rope-scaling-factor"
"""MindSpeed-LLM's kind of scaling, and its factor (mindspeed_llm/features_manager/common/rotary.py)."""

_OF_LLAMA3 = {
    "--original-max-position-embeddings": "original_positions",
    "--low-freq-factor": "low_freq_factor",
    "--high-freq-factor": "high_freq_factor",
}
_OF_YARN = {
    "--rope-scaling-original-max-position-embeddings": "original_positions",
    "--beta-fast": "beta_fast",
    "--beta-slow": "beta_slow",
    "--rope-scaling-mscale": "mscale",
    "--rope-scaling-mscale-all-dim": "mscale_all_dim",
}
_FORMER_BETAS = {"--beta-fast": "--rope-scaling-beta-fast", "--beta-slow": "--rope-scaling-beta-slow"}

MINDSPEEDS = (
    *("--rotary-percent", "--apply-layernorm-1p", "--qk-layernorm", "--swiglu", "--squared-relu"),
    *(SCALED, FACTOR, *_OF_LLAMA3, *_OF_YARN),
)
"""Flags of this module that also exist in MindSpeed, or in MindSpeed-LLM."""

BECAUSE = {
    "qk_norm_width": "its norms go over each head",
    "norm_place": "norms are before attention and MLP",
    "attention_softcap": "scores are not capped",
    "logits_softcap": "logits are not capped",
    "score_scale": "the factor of scores is no flag",
    "compressed_attention": "its latent attention has keys of each head and position",
    "parallel_residual": "the MLP comes after attention",
    "residual_streams": "its hyper-connections are of another kind",
    "window_rope_theta": "all layers have positions of one base",
    "output_bias": "the output of attention has a bias where all linear layers have one",
}
"""Reasons why parts of a model have no flags."""

_GATED_DELTA = ("gated_delta_net", "gdn")
_LINEAR = {
    "--linear-conv-kernel-dim": "conv_kernel",
    "--linear-key-head-dim": "key_dim",
    "--linear-value-head-dim": "value_dim",
    "--linear-num-key-heads": "key_heads",
    "--linear-num-value-heads": "value_heads",
}
_LINEAR_DEFAULTS = {"conv_kernel": 4, "key_dim": 128, "value_dim": 128, "key_heads": 16, "value_heads": 32}
_INDEXER = {
    "--dsa-indexer-n-heads": "heads",
    "--dsa-indexer-head-dim": "head_dim",
    "--dsa-indexer-topk": "top_k",
}


def pattern_text(layers: Sequence[int]) -> str:
    """A list of numbers, one for each layer, as Megatron-LM's list expression.

    Examples:
        >>> pattern_text([0, 1, 1, 0, 1, 1]), pattern_text([0, 1, 1, 1])
        ('([0]*1+[1]*2)*2', '([0]*1+[1]*3)')
    """
    size = len(layers)
    period = next(n for n in range(1, size + 1) if size % n == 0 and [*layers[:n]] * (size // n) == [*layers])
    runs: list[list[int]] = []
    for value in layers[:period]:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    text = "+".join(f"[{value}]*{count}" for value, count in runs)
    return f"({text})" + (f"*{size // period}" if period < size else "")


def layer_flags(model: ModelSpec, framework: str, missing: list[str]) -> tuple[Flags, Said]:
    """The flags of kinds of attention, positions, norms and activations, and the parts of a model that they
    cover.

    Unusual parts without a flag are added to `missing`.
    """
    flags, said = Flags(), dict[str, tuple[object, ...] | None]()
    for more, parts in (
        _activation(model, missing),
        _norms(model, missing),
        _positions(model),
        _mindspeeds_stretched(model) if framework == "mindspeed" else _stretched(model),
        _attention(model),
        _linear(model),
        _sparse(model),
    ):
        if framework == "mindspeed" and not {*more} <= {*MINDSPEEDS}:
            more, parts = {}, {}
        flags |= more
        said |= parts
    return flags, said


def _activation(model: ModelSpec, missing: list[str]) -> tuple[Flags, Said]:
    known: dict[tuple[bool, str], Flags] = {
        (False, "gelu"): {},
        (False, "gelu_tanh"): {},
        (True, "silu"): {"--swiglu": ""},
        (False, "relu2"): {"--squared-relu": ""},
        (True, "clamped_silu"): {
            "--quick-geglu": "",
            "--glu-linear-offset": "1.0",
            "--activation-func-clamp-value": "7.0",
        },
    }
    flags = known.get((model.gated, model.activation))
    if flags is not None:
        return flags, {"gated": None, "activation": None}
    missing.append(f"activation={model.activation}: it has no {'gated ' * model.gated}MLP of it")
    return {}, {}


def _norms(model: ModelSpec, missing: list[str]) -> tuple[Flags, Said]:
    flags: Flags = {"--apply-layernorm-1p": ""} if model.norm_from_one else {}
    said: dict[str, tuple[object, ...] | None] = {"norm": None, "norm_eps": None, "norm_from_one": None}
    if model.latent_attention is not None:
        if model.qk_norm:
            missing.append("qk_norm=true: norms of latent attention are those of its latents")
        return flags, said
    if not model.qk_norm:
        return flags, said
    if model.qk_norm_weights and model.norm == "layernorm":
        missing.append(
            "qk_norm=true: in models with LayerNorms the norms of queries and keys are LayerNorms too"
        )
    elif model.qk_norm_weights:
        flags["--qk-layernorm"] = ""
        said["qk_norm"] = None
    return flags, said


def _attention(model: ModelSpec) -> tuple[Flags, Said]:
    """The flags of windows, sinks, gates, and norms without weights."""
    kinds = [model.layer_kind(layer).attention for layer in range(model.layers)]
    flags, said = Flags(), dict[str, tuple[object, ...] | None]()
    if {*kinds} <= {"full", "window"} and "window" in kinds:
        flags["--window-size"] = f"{model.window - 1},0"
        if "full" in kinds:
            flags["--window-attn-skip-freq"] = pattern_text([int(kind == "window") for kind in kinds])
        said |= {"window": None, "attention_pattern": None}
    if model.attention_sinks:
        flags["--softmax-type"] = "learnable"
        said["attention_sinks"] = None
    if model.attention_gate:
        flags["--attention-output-gate"] = ""
        said["attention_gate"] = None
    turned = all(model.turned_by(kind) is not None for kind in kinds)
    if model.qk_norm and not model.qk_norm_weights and turned and model.latent_attention is None:
        flags["--qk-l2-norm"] = ""
        said |= {"qk_norm": None, "qk_norm_weights": None}
    return flags, said


def _positions(model: ModelSpec) -> tuple[Flags, Said]:
    said: dict[str, tuple[object, ...] | None] = {"position": None, "max_positions": None}
    if model.position != "rope":
        return {}, said
    flags, latent = Flags(), model.latent_attention is not None
    if model.rope_theta.is_integer():
        said["rope_theta"] = None
    part = model.rotary_dim or model.head_dim
    if not latent and int(model.head_dim * (part / model.head_dim)) == part:
        said["rotary_dim"] = None
        if part != model.head_dim:
            flags["--rotary-percent"] = repr(part / model.head_dim)
    return flags, said


def _stretched(model: ModelSpec) -> tuple[Flags, Said]:
    """The flags of scaled positions, and of layers without positions."""
    scaling = model.rope_scaling
    flags, said = Flags(), dict[str, tuple[object, ...] | None]()
    if model.position != "rope":
        return flags, said
    kinds = [model.layer_kind(layer).attention for layer in range(model.layers)]
    if not model.rotates_full and {*kinds} <= {"full", "window"}:
        flags["--no-rope-freq"] = pattern_text([int(kind == "full") for kind in kinds])
        said["rotates_full"] = None
    if model.latent_attention is not None and scaling is None:
        flags["--rope-type"] = "rope"  # It takes YaRN unless told.
    if scaling is None:
        return flags, said
    if scaling == LLAMA3.model_copy(update={"factor": scaling.factor}) and model.latent_attention is None:
        flags |= {"--use-rope-scaling": "", "--rope-scaling-factor": repr(scaling.factor)}
    elif scaling.kind == "yarn" and scaling == _yarn(scaling, model.latent_attention is not None):
        flags |= _yarn_flags(scaling, model.latent_attention is not None)
    else:
        return flags, said
    return flags, said | {f"rope_scaling.{name}": None for name in type(scaling).model_fields}


def _mindspeeds_stretched(model: ModelSpec) -> tuple[Flags, Said]:
    """The flags of MindSpeed-LLM for scaled positions."""
    scaling = model.rope_scaling
    if scaling is None or model.position != "rope":
        return {}, {}
    names = {"llama3": _OF_LLAMA3, "yarn": _OF_YARN}.get(scaling.kind)
    if names is None or scaling != _mindspeeds_scaling(model, scaling):
        return {}, {}
    values = {flag: getattr(scaling, name) for flag, name in names.items()}
    if scaling.kind == "yarn" and not (scaling.mscale or scaling.mscale_all_dim):
        values["--rope-scaling-mscale"] = 1.0
    flags = {SCALED: scaling.kind, FACTOR: repr(scaling.factor)}
    flags |= {flag: f"{value:g}" if value == int(value) else repr(value) for flag, value in values.items()}
    return flags, {f"rope_scaling.{name}": None for name in type(scaling).model_fields}


def _mindspeeds_scaling(model: ModelSpec, scaling: RopeScaling) -> RopeScaling:
    """The scaling that MindSpeed-LLM computes from the flags of another one."""
    if scaling.kind == "llama3":
        kept = {name: getattr(scaling, name) for name in ("factor", *_OF_LLAMA3.values())}
        return RopeScaling(kind="llama3", **kept)
    kept = {name: getattr(scaling, name) for name in ("factor", *_OF_YARN.values())}
    kept |= {name: float(int(kept[name])) for name in ("beta_fast", "beta_slow")}
    if model.latent_attention is None:
        kept["factor"] = model.max_positions / scaling.original_positions
    return RopeScaling(kind="yarn", **kept)


def with_own_yarn(model: ModelSpec) -> tuple[ModelSpec, dict[str, float]]:
    """A model with latent attention whose YaRN flags express, and the fields of `OF_LATENTS` beyond them."""
    scaling = model.rope_scaling
    if scaling is None or scaling.kind != "yarn" or model.latent_attention is None:
        return model, {}
    least = _yarn(scaling, latent=True)
    own = {
        flag[2:].replace("-", "_"): getattr(scaling, name)
        for flag, name in OF_LATENTS.items()
        if getattr(scaling, name) != getattr(least, name)
    }
    least = least.model_copy(
        update={name: getattr(scaling, name) for name in ("attention_factor", "truncate")}
    )
    return model.model_copy(update={"rope_scaling": least}), own


def why_not_scaled(model: ModelSpec, framework: str) -> str:
    """The reason why a software has no flags for the scaling of a model's positions."""
    scaling, latent = model.rope_scaling, model.latent_attention is not None
    kinds = ("yarn",) if latent and framework != "mindspeed" else ("llama3", "yarn")
    if scaling is None or scaling.kind not in kinds:
        where = " with latent attention" if len(kinds) == 1 else ""
        return f"it scales positions by {' or '.join(kinds)} alone{where}"
    if framework == "mindspeed":
        nearest = _mindspeeds_scaling(model, scaling)
    elif scaling.kind == "llama3":
        nearest = LLAMA3.model_copy(update={"factor": scaling.factor})
    else:
        nearest = _yarn(scaling, latent)
    others = [name for name in type(scaling).model_fields if getattr(nearest, name) != getattr(scaling, name)]
    pairs = [(name, _short(getattr(nearest, name)), _short(getattr(scaling, name))) for name in others]
    return ", ".join(f"{name} is always {own} there, not {wanted}" for name, own, wanted in pairs)


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_yarn(model: ModelSpec) -> bool:
    """Return whether Megatron-LM's YaRN scales the positions of attention without latents."""
    scaling = model.rope_scaling
    if scaling is None or model.position != "rope" or model.latent_attention is not None:
        return False
    return scaling.kind == "yarn" and scaling == _yarn(scaling, latent=False)


def _yarn(scaling: RopeScaling, latent: bool) -> RopeScaling:
    """The scaling that Megatron-LM computes from the flags of a YaRN."""
    names = ["factor", "mscale", "mscale_all_dim"]
    names += [] if latent else ["original_positions", "beta_fast", "beta_slow", "truncate"]
    return YARN_OF_LATENTS.model_copy(update={name: getattr(scaling, name) for name in names})


def _yarn_flags(scaling: RopeScaling, latent: bool) -> Flags:
    # Without factors of its own YaRN derives one from that of positions, as a factor of 1 over one of 0 does.
    own = scaling.mscale or scaling.mscale_all_dim
    flags = {
        "--rotary-scaling-factor": repr(scaling.factor),
        "--mscale": repr(scaling.mscale if own else 1.0),
        "--mscale-all-dim": repr(scaling.mscale_all_dim),
    }
    if latent:
        return {"--rope-type": "yarn"} | flags
    flags["--yarn-original-max-position-embeddings"] = str(scaling.original_positions)
    flags |= {"--yarn-beta-fast": repr(scaling.beta_fast), "--yarn-beta-slow": repr(scaling.beta_slow)}
    return flags | ({} if scaling.truncate else {"--no-yarn-correction-range-round-to-int": ""})


def _linear(model: ModelSpec) -> tuple[Flags, Said]:
    linear = model.linear_attention
    kinds = [model.layer_kind(layer).attention for layer in range(model.layers)]
    if linear is None or linear.kind != "gated_delta" or not {"linear"} <= {*kinds} <= {"full", "linear"}:
        return {}, {}
    flags = {
        "--experimental-attention-variant": _GATED_DELTA[0],
        "--linear-attention-freq": pattern_text([int(kind == "linear") for kind in kinds]),
        **{flag: str(getattr(linear, name)) for flag, name in _LINEAR.items()},
    }
    said: dict[str, tuple[object, ...] | None] = {
        f"linear_attention.{name}": None for name in ("kind", *_LINEAR.values())
    }
    usual = {"linear_attention.conv_bias": (False,), "linear_attention.chunk": (64,)}
    return flags, said | usual | {"attention_pattern": None}


def _sparse(model: ModelSpec) -> tuple[Flags, Said]:
    """The flags of DeepSeek's sparse attention, with an indexer in all layers."""
    indexer, latent = model.indexer, model.latent_attention
    kinds = {model.layer_kind(layer).attention for layer in range(model.layers)}
    if indexer is None or latent is None or indexer.share != 1 or kinds != {"full"} or model.linear_bias:
        return {}, {}
    flags = {"--experimental-attention-variant": "dsa"}
    flags |= {flag: str(getattr(indexer, name)) for flag, name in _INDEXER.items()}
    return flags, {f"indexer.{name}": None for name in type(indexer).model_fields}


Given = Mapping[str, GivenFlag]


def with_layers(spec: ModelSpec, given: Given, problems: Problems) -> dict[str, Any]:
    """Fields of a model that the flags of this module change; errors are added to `problems`."""
    reader = _Reader(spec, given, problems)
    return {
        **reader.activation(),
        **reader.norms(),
        **reader.positions(),
        **reader.attention(),
    }


class _Reader:
    def __init__(self, spec: ModelSpec, given: Given, problems: Problems) -> None:
        self.spec, self.given, self.problems = spec, given, problems

    def has(self, name: str) -> bool:
        return name in self.given

    def text(self, name: str) -> str | None:
        """The value of a flag; None where it is not given, empty, or depends on something unknown."""
        flag = self.given.get(name)
        if flag is None or flag.unknown or not flag.values:
            return None
        return ",".join(word.text for word in flag.values)

    def _wrong(self, name: str, what: str) -> None:
        flag = self.given[name]
        self.problems.add("illegal", f"{flag.text[:80]!r} is not {what}", flag.name, flag.line)

    def number(self, name: str, usual: float) -> float:
        text = self.text(name)
        if text is None:
            return usual
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not -1e12 < value < 1e12:
            self._wrong(name, "a number")
            return usual
        return value

    def count(self, name: str, usual: int) -> int:
        text = self.text(name)
        if text is None:
            return usual
        if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
            self._wrong(name, "a whole number from 1")
            return usual
        return int(text)

    def layers(self, name: str, of_number: Any) -> list[int] | None:
        """A list of 0 or 1 for each layer; `of_number` makes the list from a single number."""
        text = self.text(name)
        if text is None:
            return None
        if re.fullmatch(r"[1-9][0-9]{0,6}", text):
            return [int(of_number(layer, int(text))) for layer in range(self.spec.layers)]
        found = list_of_layers(f"[{text}]" if re.fullmatch(r"[01](,[01])*", text) else text)
        if found is None or len(found) != self.spec.layers or not {*found} <= {0, 1}:
            self._wrong(name, f"a number, or a list of 0 and 1 for {self.spec.layers} layers")
            return None
        return found

    def activation(self) -> dict[str, Any]:
        # MindSpeed-LLM, mindspeed_llm/core/transformer/mlp.py: the later one counts, and both have a gate.
        for name, kind in (("--gelu-tanh", "gelu_tanh"), ("--geglu", "gelu")):
            if self.has(name):
                return {"gated": True, "activation": kind}
        if not self.has("--quick-geglu"):
            return {}
        offset, clamp = (
            self.number("--glu-linear-offset", 0.0),
            self.number("--activation-func-clamp-value", 0.0),
        )
        if (offset, clamp) != (1.0, 7.0):
            flag = self.given["--quick-geglu"]
            text = "is priced with an offset of 1 and clamped at 7"
            self.problems.add("note", text, flag.name, flag.line)
        return {"gated": True, "activation": "clamped_silu"}

    def norms(self) -> dict[str, Any]:
        found: dict[str, Any] = {"norm_from_one": True} if self.has("--apply-layernorm-1p") else {}
        if self.has("--qk-l2-norm") and self.spec.latent_attention is None:
            found |= {"qk_norm": True, "qk_norm_weights": False}
        return found

    def positions(self) -> dict[str, Any]:
        spec, found = self.spec, dict[str, Any]()
        if spec.position != "rope":
            return found
        if spec.latent_attention is None and self.has("--rotary-percent"):
            share = self.number("--rotary-percent", 1.0)
            turned = int(spec.head_dim * share)
            if not 0 < share <= 1 or turned < 2 or turned % 2:
                self._wrong("--rotary-percent", "a share that turns an even number of elements")
            elif turned != spec.head_dim:
                found["rotary_dim"] = turned
        kept = self.layers("--no-rope-freq", lambda layer, every: (layer + 1) % every == 0)
        if kept is not None and any(kept):
            kinds = self.kinds()
            if [int(kind == "full") for kind in kinds] == kept:
                found["rotates_full"] = False
            else:
                flag = self.given["--no-rope-freq"]
                text = "is not priced: layers without positions are those of full attention among others"
                self.problems.add("note", text, flag.name, flag.line)
        return found | self._stretched()

    def _stretched(self) -> dict[str, Any]:
        latent = self.spec.latent_attention is not None
        if self.text(SCALED) in ("llama3", "yarn"):
            return self._mindspeeds_stretched()
        named = self.text("--rope-type") if latent else self.text("--position-embedding-type")
        factor = self.number("--rotary-scaling-factor", 1.0)
        own = {"mscale": self.number("--mscale", 1.0), "mscale_all_dim": self.number("--mscale-all-dim", 0.0)}
        if own == {"mscale": 1.0, "mscale_all_dim": 0.0}:
            own = {"mscale": 0.0, "mscale_all_dim": 0.0}
        if latent and named in (None, "yarn") and factor > 1:
            own |= {
                name: self.number(flag, getattr(YARN_OF_LATENTS, name)) for flag, name in OF_LATENTS.items()
            }
            own["original_positions"] = int(own["original_positions"])
            return {"rope_scaling": YARN_OF_LATENTS.model_copy(update={"factor": factor, **own}).model_dump()}
        if not latent and named == "yarn":
            sizes = {
                "factor": factor,
                "original_positions": self.count("--yarn-original-max-position-embeddings", 4096),
                "beta_fast": self.number("--yarn-beta-fast", 32.0),
                "beta_slow": self.number("--yarn-beta-slow", 1.0),
                "truncate": not self.has("--no-yarn-correction-range-round-to-int"),
            }
            return {"rope_scaling": {"kind": "yarn"} | sizes | own}
        if not latent and self.has("--use-rope-scaling"):
            factor = self.number("--rope-scaling-factor", 8.0)
            return {"rope_scaling": LLAMA3.model_copy(update={"factor": factor}).model_dump()}
        return {}

    def _mindspeeds_stretched(self) -> dict[str, Any]:
        kind = self.text(SCALED)
        names = _OF_LLAMA3 if kind == "llama3" else _OF_YARN
        values: dict[str, Any] = {"kind": kind, "factor": self.number(FACTOR, 8.0)}
        for flag, name in names.items():
            usual = RopeScaling.model_fields[name].default
            if name == "mscale":
                usual = 1.0
            values[name] = self.number(flag, self.number(_FORMER_BETAS.get(flag, flag), usual))
        if not values["original_positions"] >= 1:
            return {}  # It is not said.
        values["original_positions"] = int(values["original_positions"])
        if kind == "yarn":
            if (values["mscale"], values["mscale_all_dim"]) == (1.0, 0.0):
                values["mscale"] = 0.0
            if self.spec.latent_attention is None:
                values["factor"] = self.spec.max_positions / values["original_positions"]
        return {"rope_scaling": values}

    def kinds(self) -> list[str]:
        """The kind of attention of each layer."""
        windows, linear = self._windows(), self._linear_layers()
        return [
            "linear" if linear is not None and linear[layer] else "window" if windows[layer] else "full"
            for layer in range(self.spec.layers)
        ]

    def _window(self) -> int:
        """Tokens of a window; 0 without a window."""
        text = self.text("--window-size")
        if text is None or text.lower() == "none":
            return 0
        match = re.fullmatch(r"\(?\s*(-?[0-9]{1,9})\s*,\s*(-?[0-9]{1,9})\s*\)?", text)
        if match is None:
            self._wrong("--window-size", "two numbers such as 4095,0")
            return 0
        return max(int(match.group(1)) + 1, 0)

    def _windows(self) -> list[int]:
        if not self._window():
            return [0] * self.spec.layers
        found = self.layers("--window-attn-skip-freq", lambda layer, every: (layer + 1) % every != 0)
        return [1] * self.spec.layers if found is None else found

    def _linear_layers(self) -> list[int] | None:
        if self.text("--experimental-attention-variant") not in _GATED_DELTA:
            return None
        return self.layers("--linear-attention-freq", lambda layer, every: (layer + 1) % every != 0)

    def attention(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        kinds = self.kinds()
        if {*kinds} != {"full"}:
            found["attention_pattern"] = tuple(kinds)
        if "window" in kinds:
            found["window"] = self._window()
        if "linear" in kinds:
            sizes = {name: self.count(flag, _LINEAR_DEFAULTS[name]) for flag, name in _LINEAR.items()}
            found["linear_attention"] = LinearAttention.model_validate(
                {"kind": "gated_delta"} | sizes
            ).model_dump()
        variant = self.text("--experimental-attention-variant")
        if variant == "dsa" and self.spec.latent_attention is not None:
            sizes = {name: self.count(flag, 0) for flag, name in _INDEXER.items()}
            if all(sizes.values()):
                found["indexer"] = Indexer(**sizes).model_dump()
            else:
                self._wrong("--experimental-attention-variant", f"complete without {', '.join(_INDEXER)}")
        elif variant is not None and variant not in (*_GATED_DELTA, "dsa", "None"):
            flag = self.given["--experimental-attention-variant"]
            self.problems.add(
                "unknown", f"{variant} is not priced", flag.name, flag.line, "give the model by --model"
            )
        if self.has("--attention-output-gate"):
            found["attention_gate"] = True
        softmax = self.text("--softmax-type")
        if softmax == "learnable":
            found["attention_sinks"] = True
        return found
