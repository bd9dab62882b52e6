"""The mapping between tensors of a Hugging Face model and this runtime's tensors, by model type.

A Hugging Face tensor consists of parts along one dimension. Each part is one of this runtime's tensors, or
one expert of a stacked tensor, in the form of the Hugging Face tensor. The same table serves both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from costmodels import ModelSpec
from costmodels.spec.model_parts import LayerKind
from runtime.model.transformer import Transformer

EMBEDDING, HEAD = "embedding.tokens.weight", "head.weight"
"""This runtime's tensors with a row for each entry of the vocabulary, followed by padding."""

GPT2_PREFIX = "transformer."
"""Prefix of the names of a GPT-2 that was saved with its head; the first models were saved without."""


Shapes = Mapping[str, torch.Size]
"""Shapes of the runtime's tensors, by name."""


@dataclass(frozen=True)
class Part:
    """One of this runtime's tensors as a part of a Hugging Face tensor."""

    ours: str
    expert: int | None = None
    """The number of the expert in this runtime's stack [E, ...]."""
    transposed: bool = False
    """True if the Hugging Face tensor is [inputs, outputs], as Conv1D of GPT-2 and the experts of gpt-oss."""
    blocks: int = 0
    """Number of equal blocks of rows whose last `pairs` rows have rotary embedding. Hugging Face rotates
    neighbouring elements by one angle; this runtime rotates an element of the first half with one of the
    second. 0: both have the same order of rows."""
    pairs: int = 0
    leading: bool = False
    """True if the first rows of every block have rotary embedding, not the last."""
    besides: int | None = None
    """The additional dimension of size 1 in the Hugging Face tensor: one channel of kernels, [rows, 1,
    columns]."""

    def to_theirs(self, tensor: Tensor) -> Tensor:
        """This runtime's tensor (for one expert, [rows, columns] or [rows]) in the form of the Hugging Face
        tensor."""
        if self.blocks:
            halves = torch.arange(self.pairs, device=tensor.device)
            tensor = self._reordered(tensor, halves.view(2, -1).T.flatten())
        if self.besides is not None:
            return tensor.unsqueeze(self.besides)
        return tensor.mT if self.transposed else tensor

    def to_ours(self, tensor: Tensor) -> Tensor:
        """The reverse of `to_theirs`."""
        if self.besides is not None:
            return tensor.squeeze(self.besides)
        tensor = tensor.mT if self.transposed else tensor
        if self.blocks:
            pairs = torch.arange(self.pairs, device=tensor.device)
            tensor = self._reordered(tensor, pairs.view(-1, 2).T.flatten())
        return tensor

    def _reordered(self, tensor: Tensor, order: Tensor) -> Tensor:
        """`tensor` with the rotary rows of every block in the other order."""
        rows = tensor.view(self.blocks, -1, *tensor.shape[1:])
        first = 0 if self.leading else rows.shape[1] - self.pairs
        turned = rows[:, first : first + self.pairs][:, order]
        return torch.cat((rows[:, :first], turned, rows[:, first + self.pairs :]), dim=1).flatten(0, 1)


class Entry(NamedTuple):
    """One Hugging Face tensor, with its parts."""

    theirs: str
    parts: tuple[Part, ...]
    dim: int = 0
    """The dimension along which the parts are concatenated."""
    interleaved: bool = False
    """True if the parts' elements alternate along the last dimension."""
    groups: int = 1
    """Number of equal shares of each part's rows; the first shares of all parts come first, then the second
    ones."""

    def join(self, read: Callable[[Part], Tensor]) -> Tensor:
        """The Hugging Face tensor; `read` returns this runtime's tensor of a part."""
        tensors = [part.to_theirs(read(part)) for part in self.parts]
        if self.interleaved:
            return torch.stack(tensors, dim=-1).flatten(-2)
        if self.groups > 1:
            shares = [tensor.reshape(self.groups, -1, *tensor.shape[1:]) for tensor in tensors]
            return torch.cat(shares, dim=1).flatten(0, 1)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, self.dim)

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The shape of the Hugging Face tensor, from the shapes of this runtime's tensors."""
        return tuple(self.join(lambda part: _on_meta(part, shapes)).shape)

    def take(self, theirs: Tensor, wanted: Part, shapes: Shapes) -> Tensor:
        """This runtime's tensor for the part `wanted` of the Hugging Face tensor `theirs`."""
        widths = [part.to_theirs(_on_meta(part, shapes)).shape[self.dim] for part in self.parts]
        number = self.parts.index(wanted)
        if self.interleaved:
            return wanted.to_ours(theirs[..., number :: len(self.parts)])
        if self.groups > 1:
            first, width = sum(widths[:number]) // self.groups, widths[number] // self.groups
            shares = theirs.reshape(self.groups, -1, *theirs.shape[1:])
            return wanted.to_ours(shares.narrow(1, first, width).flatten(0, 1))
        return wanted.to_ours(theirs.narrow(self.dim, sum(widths[:number]), widths[number]))


def _on_meta(part: Part, shapes: Shapes) -> Tensor:
    shape = shapes[part.ours]
    return torch.empty(shape if part.expert is None else shape[1:], device="meta")


def our_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Shapes of the tensors of a model by name, in the order of its layers and without padded entries.

    A tied head is left out, as it is the embedding.
    """
    with torch.device("meta"):
        model = Transformer(spec, spec.vocab)
    return {
        name: tensor.shape for name, tensor in model.state_dict().items() if not (spec.tied and name == HEAD)
    }


def mapping(
    model_type: str, spec: ModelSpec, interleaved: bool = True, is_stacked: bool = False
) -> list[Entry]:
    """The tensors of a Hugging Face model of `model_type`, ordered so that parts of one of this runtime's
    tensors are adjacent.

    Args:
        model_type: one of `planner.inputs.huggingface.readers.READERS`.
        interleaved: latent attention rotates neighbouring elements (`rope_interleave` of a config.json).
        is_stacked: the experts of a layer are one tensor, although transformers writes each by itself.
    """
    if model_type == "gpt2":
        return list(_gpt2(spec))
    style = style_of(model_type)
    if is_stacked:
        style = style._replace(experts=style.experts._replace(stacked=_STACKED))
    further = _further(spec, style, interleaved) if model_type in FURTHER_TYPES else ()
    return [*_llama(spec, style, interleaved), *further]


def _one(theirs: str, ours: str, transposed: bool = False) -> Entry:
    return Entry(theirs, (Part(ours, transposed=transposed),))


_GPT2_LINEAR = {"attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_GPT2_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}


def _gpt2(spec: ModelSpec) -> Iterator[Entry]:
    yield _one(f"{GPT2_PREFIX}wte.weight", EMBEDDING)
    yield _one(f"{GPT2_PREFIX}wpe.weight", "embedding.positions.weight")
    for layer in range(spec.layers):
        theirs, ours = f"{GPT2_PREFIX}h.{layer}.", f"layers.{layer}."
        for kind in ("weight", "bias"):
            transposed = kind == "weight"
            names = [f"{ours}attention.{name}.{kind}" for name in ("query", "key", "value")]
            parts = tuple(Part(name, transposed=transposed) for name in names)
            yield Entry(f"{theirs}attn.c_attn.{kind}", parts, dim=1 if transposed else 0)
            for name, place in _GPT2_LINEAR.items():
                yield _one(f"{theirs}{place}.{kind}", f"{ours}{name}.{kind}", transposed)
            for name, place in _GPT2_NORMS.items():
                yield _one(f"{theirs}{place}.{kind}", f"{ours}{name}.{kind}")
    for kind in ("weight", "bias"):
        yield _one(f"{GPT2_PREFIX}ln_f.{kind}", f"norm.{kind}")
    if not spec.tied:
        yield _one("lm_head.weight", HEAD)


class _Stack(NamedTuple):
    """The layout of stacked experts: one tensor for gate and input, and one for the output."""

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    transposed: bool = False
    """True if the stack has matrices [inputs, outputs]."""
    takes_turns: bool = False
    """True if the columns of gate and input alternate."""


class _ExpertNames(NamedTuple):
    """Names of the parts of a layer with experts, in one model type."""

    mlp: str
    matrices: dict[str, str]
    shared: str
    bias: str = "gate.e_score_correction_bias"
    """The name of the buffer with the routing biases."""
    bias_is_row: bool = False
    """True if the bias has the shape [1, experts]."""
    router: str = "gate"
    stacked: _Stack | None = None


_MATRICES = {"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}
_QWEN_EXPERTS = _ExpertNames("mlp", _MATRICES, "shared_expert")
_DEEPSEEK_EXPERTS = _ExpertNames("mlp", _MATRICES, "shared_experts")
_MIXTRAL_EXPERTS = _ExpertNames("block_sparse_moe", {"up": "w3", "gate": "w1", "down": "w2"}, "")
_MINIMAX_EXPERTS = _MIXTRAL_EXPERTS._replace(bias="e_score_correction_bias")
_ERNIE_EXPERTS = _DEEPSEEK_EXPERTS._replace(bias="moe_statics.e_score_correction_bias", bias_is_row=True)

_STACKED = _Stack()
STACKED_TYPES = ("qwen3_5_moe_text",)
"""Model types that are published with all experts of a layer in one tensor, and saved with separate
experts."""

_GPT_OSS_EXPERTS = _ExpertNames(
    "mlp", _MATRICES, "", router="router", stacked=_Stack(transposed=True, takes_turns=True)
)
_LLAMA4_EXPERTS = _ExpertNames(
    "feed_forward", _MATRICES, "shared_expert", router="router", stacked=_Stack(transposed=True)
)
_GRANITE_EXPERTS = _ExpertNames(
    "block_sparse_moe",
    _MATRICES,
    "",
    router="router.layer",
    stacked=_Stack("input_linear.weight", "output_linear.weight"),
)

_BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_AFTER = {"attended_norm": "post_attention_layernorm", "computed_norm": "post_feedforward_layernorm"}
_GLM4_NORMS = _BEFORE | {
    "attended_norm": "post_self_attn_layernorm",
    "computed_norm": "post_mlp_layernorm",
}
_GEMMA_NORMS = _AFTER | {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}


class Style(NamedTuple):
    """Names, concatenations and orders of the tensors of a Llama-like model type."""

    norms: dict[str, str] = _BEFORE
    joined_attention: bool = False
    """True if queries, keys and values are one matrix."""
    joined_mlp: bool = False
    """True if gate and input of the MLP are one matrix."""
    turns_neighbours: bool = False
    """True if rotary embedding rotates neighbouring elements, in attention with grouped queries."""
    mlp: dict[str, str] = _MATRICES
    mlp_name: str = "mlp"
    experts: _ExpertNames = _QWEN_EXPERTS
    joined_delta: bool = False
    """True if queries, keys, values and gate of linear attention are one matrix, and strengths and decays
    another."""


STYLES = {
    "mixtral": Style(experts=_MIXTRAL_EXPERTS),
    "minimax_m2": Style(experts=_MINIMAX_EXPERTS),
    "qwen3_next": Style(joined_delta=True),
    "gpt_oss": Style(experts=_GPT_OSS_EXPERTS),
    "granitemoe": Style(experts=_GRANITE_EXPERTS),
    "llama4_text": Style(turns_neighbours=True, mlp_name="feed_forward", experts=_LLAMA4_EXPERTS),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite"),
        Style(experts=_DEEPSEEK_EXPERTS),
    ),
    "phi3": Style(joined_attention=True, joined_mlp=True),
    "glm": Style(joined_mlp=True, turns_neighbours=True),
    "glm4": Style(_GLM4_NORMS, joined_mlp=True, turns_neighbours=True),
    "ernie4_5": Style(turns_neighbours=True),
    "ernie4_5_moe": Style(turns_neighbours=True, experts=_ERNIE_EXPERTS),
    "olmo2": Style(_AFTER),
    "olmo3": Style(_AFTER),
    "exaone4": Style(_AFTER),
    **dict.fromkeys(("gemma2", "gemma3_text"), Style(_GEMMA_NORMS)),
    "starcoder2": Style(mlp={"up": "c_fc", "down": "c_proj"}),
}
"""Styles by model type; missing types are like Llama or Qwen."""


def style_of(model_type: str) -> Style:
    """The style of a model type except GPT-2's."""
    return STYLES.get(model_type, Style())


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _llama(spec: ModelSpec, style: Style, interleaved: bool) -> Iterator[Entry]:
    yield _one("model.embed_tokens.weight", EMBEDDING)
    for layer in range(spec.layers):
        kind = spec.layer_kind(layer)
        yield from _layer(spec, style, kind, f"model.layers.{layer}.", f"layers.{layer}.", interleaved)
    for word in _kinds(spec.norm == "layernorm"):
        yield _one(f"model.norm.{word}", f"norm.{word}")
    if not spec.tied:
        yield _one("lm_head.weight", HEAD)


def _layer(
    spec: ModelSpec, style: Style, kind: LayerKind, theirs: str, ours: str, interleaved: bool
) -> Iterator[Entry]:
    places = {"before": _BEFORE, "after": _AFTER, "around": _BEFORE | _AFTER}[spec.norm_place]
    for word in _kinds(spec.norm == "layernorm"):
        for name in places:
            yield _one(f"{theirs}{style.norms[name]}.{word}", f"{ours}{name}.{word}")
    attention = f"{theirs}self_attn.", f"{ours}attention."
    if kind.attention == "linear":
        yield from _gated_delta(spec, style, f"{theirs}linear_attn.", f"{ours}attention.")
    elif spec.latent_attention is None:
        yield from _attention(spec, style, *attention)
    else:
        yield from _latent(spec, *attention, interleaved)
    if kind.mlp == "experts":
        yield from _experts(spec, style.experts, f"{theirs}{style.experts.mlp}.", f"{ours}mlp.")
    else:
        yield from _mlp(spec, style, f"{theirs}{style.mlp_name}.", f"{ours}mlp.")


FURTHER_TYPES = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite")
"""Model types whose files have MTP layers after the last; transformers skips them."""

_FURTHER = {"token_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}


def _further(spec: ModelSpec, style: Style, interleaved: bool) -> Iterator[Entry]:
    """Entries of MTP modules, as in DeepSeek-V3's files (its README_WEIGHTS.md)."""
    kind = spec.layer_kind(spec.layers - 1)
    for depth in range(spec.mtp_depths):
        theirs, ours = f"model.layers.{spec.layers + depth}.", f"mtp.{depth}."
        for name, place in _FURTHER.items():
            yield _one(f"{theirs}{place}.weight", f"{ours}{name}.weight")
        yield from _layer(spec, style, kind, theirs, f"{ours}block.", interleaved)


def further_copies(spec: ModelSpec) -> dict[str, str]:
    """Names of the copies of embedding and head in MTP layers, and this runtime's names of the originals."""
    copies = {}
    for depth in range(spec.mtp_depths):
        theirs = f"model.layers.{spec.layers + depth}."
        copies[f"{theirs}embed_tokens.weight"] = EMBEDDING
        copies[f"{theirs}shared_head.head.weight"] = EMBEDDING if spec.tied else HEAD
    return copies


def _attention(spec: ModelSpec, style: Style, theirs: str, ours: str) -> Iterator[Entry]:
    heads = {"query": spec.heads, "key": spec.kv_heads, "value": 0} if style.turns_neighbours else {}
    turned = spec.rotary_dim or spec.head_dim
    for kind in _kinds(spec.qkv_bias or spec.linear_bias):
        parts = [
            Part(f"{ours}{name}.{kind}", blocks=heads.get(name, 0), pairs=turned, leading=True)
            for name in ("query", "key", "value")
        ]
        if style.joined_attention:
            yield Entry(f"{theirs}qkv_proj.{kind}", tuple(parts))
            continue
        for part, place in zip(parts, "qkv", strict=True):
            if spec.attention_gate and place == "q":
                yield Entry(f"{theirs}q_proj.{kind}", (part, Part(f"{ours}gate.{kind}")), groups=spec.heads)
            else:
                yield Entry(f"{theirs}{place}_proj.{kind}", (part,))
    if spec.qk_norm and spec.qk_norm_weights:
        for name in ("q", "k"):
            long = {"q": "query", "k": "key"}[name]
            yield _one(f"{theirs}{name}_norm.weight", f"{ours}{long}_norm.weight")
    if spec.attention_sinks:
        yield _one(f"{theirs}sinks", f"{ours}core.sinks")
    for kind in _kinds(spec.linear_bias or spec.output_bias):
        yield _one(f"{theirs}o_proj.{kind}", f"{ours}output.{kind}")


def _gated_delta(spec: ModelSpec, style: Style, theirs: str, ours: str) -> Iterator[Entry]:
    sizes, own = spec.linear_attention, f"{ours}inputs."
    assert sizes is not None
    q, k, v, strength, decay = (
        Part(f"{own}{name}.weight") for name in ("query", "key", "value", "strength", "decay")
    )
    gate = Part(f"{ours}gate.weight")
    if style.joined_delta:
        yield Entry(f"{theirs}in_proj_qkvz.weight", (q, k, v, gate), groups=sizes.key_heads)
        yield Entry(f"{theirs}in_proj_ba.weight", (strength, decay), groups=sizes.key_heads)
    else:
        yield Entry(f"{theirs}in_proj_qkv.weight", (q, k, v))
        for place, part in (("z", gate), ("b", strength), ("a", decay)):
            yield Entry(f"{theirs}in_proj_{place}.weight", (part,))
    kernels = [Part(f"{own}{name}_conv", besides=1) for name in ("query", "key", "value")]
    yield Entry(f"{theirs}conv1d.weight", tuple(kernels))
    yield _one(f"{theirs}A_log", f"{own}rate")
    yield _one(f"{theirs}dt_bias", f"{own}step_bias")
    yield _one(f"{theirs}norm.weight", f"{ours}gated_norm.weight")
    yield _one(f"{theirs}out_proj.weight", f"{ours}output.weight")


def _latent(spec: ModelSpec, theirs: str, ours: str, interleaved: bool) -> Iterator[Entry]:
    sizes = spec.latent_attention
    assert sizes is not None
    rope = sizes.qk_rope_head_dim
    heads, whole = (spec.heads, 1) if interleaved else (0, 0)
    queries = Part(f"{ours}query.weight", blocks=heads, pairs=rope)
    if sizes.q_lora_rank:
        yield _one(f"{theirs}q_a_proj.weight", f"{ours}compress.query.weight")
        yield _one(f"{theirs}q_a_layernorm.weight", f"{ours}compress.query_norm.weight")
    yield Entry(f"{theirs}{'q_b_proj' if sizes.q_lora_rank else 'q_proj'}.weight", (queries,))
    latents = Part(f"{ours}compress.latent.weight", blocks=whole, pairs=rope)
    yield Entry(f"{theirs}kv_a_proj_with_mqa.weight", (latents,))
    yield _one(f"{theirs}kv_a_layernorm.weight", f"{ours}compress.latent_norm.weight")
    yield _one(f"{theirs}kv_b_proj.weight", f"{ours}key_value.weight")
    yield _one(f"{theirs}o_proj.weight", f"{ours}output.weight")


def _mlp(spec: ModelSpec, style: Style, theirs: str, ours: str) -> Iterator[Entry]:
    for kind in _kinds(spec.linear_bias):
        if style.joined_mlp:
            parts = Part(f"{ours}gate.{kind}"), Part(f"{ours}up.{kind}")
            yield Entry(f"{theirs}gate_up_proj.{kind}", parts)
        for name, place in style.mlp.items():
            if name == "down" or (not style.joined_mlp and (name != "gate" or spec.gated)):
                yield _one(f"{theirs}{place}.{kind}", f"{ours}{name}.{kind}")


def _experts(spec: ModelSpec, names: _ExpertNames, theirs: str, ours: str) -> Iterator[Entry]:
    for kind in _kinds(spec.router.bias):
        yield _one(f"{theirs}{names.router}.{kind}", f"{ours}router.{kind}")
    if spec.router.expert_bias:
        bias = Part(f"{ours}router.expert_bias", besides=0 if names.bias_is_row else None)
        yield Entry(f"{theirs}{names.bias}", (bias,))
    if names.stacked:
        yield from _stacked_experts(spec, names.stacked, theirs, f"{ours}experts.")
    for name, place in names.matrices.items() if not names.stacked else ():
        for expert in range(spec.experts):
            part = Part(f"{ours}experts.{name}", expert)
            yield Entry(f"{theirs}experts.{expert}.{place}.weight", (part,))
    if spec.shared_expert_ffn:
        yield from _mlp(spec, Style(), f"{theirs}{names.shared}.", f"{ours}shared.")
    if spec.shared_expert_gate:
        yield _one(f"{theirs}shared_expert_gate.weight", f"{ours}shared_gate.weight")


def _stacked_experts(spec: ModelSpec, stack: _Stack, theirs: str, ours: str) -> Iterator[Entry]:
    for kind in ("", "_bias") if spec.linear_bias else ("",):
        turned = stack.transposed and not kind
        gate, up, down = (Part(f"{ours}{name}{kind}", transposed=turned) for name in ("gate", "up", "down"))
        yield Entry(f"{theirs}{stack.gate_up}{kind}", (gate, up), 2 if turned else 1, stack.takes_turns)
        yield Entry(f"{theirs}{stack.down}{kind}", (down,))
