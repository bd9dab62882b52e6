"""Which tensor of a Hugging Face model holds which tensors of ours, by model type.

A tensor of theirs is made of parts, one after the other along one dimension; each part is a tensor of ours,
or one expert of a stacked one, in the form that theirs has. The same table serves both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from costmodels import ModelSpec
from runtime.model.transformer import Transformer

EMBEDDING, HEAD = "embedding.tokens.weight", "head.weight"
"""Our tensors with a row for each entry of the vocabulary, and padding behind them."""

GPT2_PREFIX = "transformer."
"""What the names of a GPT-2 begin with when it was saved with its head; the first ones were saved without."""


Shapes = Mapping[str, torch.Size]
"""Of our tensors, by name."""


@dataclass(frozen=True)
class Part:
    """One tensor of ours in one of theirs."""

    ours: str
    expert: int | None = None
    """Which of our stacked experts [E, ...] it is."""
    transposed: bool = False
    """A Conv1D of GPT-2 holds [inputs, outputs]."""
    blocks: int = 0
    """Equal blocks of rows of which the last `pairs` rows turn by rotary positions: theirs turns neighbours
    by one angle, ours an element of the first half and one of the second. 0: the rows are in one order."""
    pairs: int = 0

    def to_theirs(self, tensor: Tensor) -> Tensor:
        """Our tensor (of one expert, [rows, columns] or [rows]) in the form of theirs."""
        if self.blocks:
            halves = torch.arange(self.pairs, device=tensor.device)
            tensor = self._reordered(tensor, halves.view(2, -1).T.flatten())
        return tensor.T if self.transposed else tensor

    def to_ours(self, tensor: Tensor) -> Tensor:
        """The reverse of `to_theirs`."""
        tensor = tensor.T if self.transposed else tensor
        if self.blocks:
            pairs = torch.arange(self.pairs, device=tensor.device)
            tensor = self._reordered(tensor, pairs.view(-1, 2).T.flatten())
        return tensor

    def _reordered(self, tensor: Tensor, order: Tensor) -> Tensor:
        """`tensor` with the last rows of every block in another order."""
        rows = tensor.view(self.blocks, -1, *tensor.shape[1:])
        kept = rows.shape[1] - self.pairs
        return torch.cat((rows[:, :kept], rows[:, kept:][:, order]), dim=1).flatten(0, 1)


class Entry(NamedTuple):
    """One tensor of theirs."""

    theirs: str
    parts: tuple[Part, ...]
    dim: int = 0
    """Along which the parts are joined."""

    def join(self, read: Callable[[Part], Tensor]) -> Tensor:
        """The tensor of theirs, from `read`, which gives the tensor of ours that a part names."""
        tensors = [part.to_theirs(read(part)) for part in self.parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, self.dim)

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Shape of the tensor of theirs, by those of ours."""
        return tuple(self.join(lambda part: _on_meta(part, shapes)).shape)

    def take(self, theirs: Tensor, wanted: Part, shapes: Shapes) -> Tensor:
        """The tensor of ours that is the part `wanted` of `theirs`."""
        widths = [part.to_theirs(_on_meta(part, shapes)).shape[self.dim] for part in self.parts]
        number = self.parts.index(wanted)
        return wanted.to_ours(theirs.narrow(self.dim, sum(widths[:number]), widths[number]))


def _on_meta(part: Part, shapes: Shapes) -> Tensor:
    shape = shapes[part.ours]
    return torch.empty(shape if part.expert is None else shape[1:], device="meta")


def our_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Shapes of the tensors of a model by name, in the order of its layers and without padded entries.

    A tied head is left out: it is the embedding.
    """
    with torch.device("meta"):
        model = Transformer(spec, spec.vocab)
    return {
        name: tensor.shape for name, tensor in model.state_dict().items() if not (spec.tied and name == HEAD)
    }


def mapping(model_type: str, spec: ModelSpec, interleaved: bool = True) -> list[Entry]:
    """The tensors of a Hugging Face model of `model_type`, in an order in which ours change slowly.

    Args:
        model_type: one of `planner.inputs.hf_readers.READERS`.
        interleaved: latent attention turns neighbours (`rope_interleave` of a config.json).
    """
    return list(_gpt2(spec) if model_type == "gpt2" else _llama(model_type, spec, interleaved))


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


class _ExpertNames(NamedTuple):
    """What a model type calls the parts of a layer with experts."""

    mlp: str
    matrices: dict[str, str]
    shared: str


_MATRICES = {"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}
_EXPERT_NAMES = {"mixtral": _ExpertNames("block_sparse_moe", {"up": "w3", "gate": "w1", "down": "w2"}, "")}
_QWEN_EXPERTS = _ExpertNames("mlp", _MATRICES, "shared_expert")
_DEEPSEEK_EXPERTS = _ExpertNames("mlp", _MATRICES, "shared_experts")


def _llama(model_type: str, spec: ModelSpec, interleaved: bool) -> Iterator[Entry]:
    yield _one("model.embed_tokens.weight", EMBEDDING)
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        yield _one(f"{theirs}input_layernorm.weight", f"{ours}attention_norm.weight")
        attention = f"{theirs}self_attn.", f"{ours}attention."
        if spec.latent_attention is None:
            yield from _attention(spec, *attention)
        else:
            yield from _latent(spec, *attention, interleaved)
        yield _one(f"{theirs}post_attention_layernorm.weight", f"{ours}mlp_norm.weight")
        if spec.experts and layer >= spec.dense_layers:
            usual = _QWEN_EXPERTS if spec.latent_attention is None else _DEEPSEEK_EXPERTS
            names = _EXPERT_NAMES.get(model_type, usual)
            yield from _experts(spec, names, f"{theirs}{names.mlp}.", f"{ours}mlp.")
        else:
            yield from _mlp(f"{theirs}mlp.", f"{ours}mlp.")
    yield _one("model.norm.weight", "norm.weight")
    if not spec.tied:
        yield _one("lm_head.weight", HEAD)


def _attention(spec: ModelSpec, theirs: str, ours: str) -> Iterator[Entry]:
    for name, place in (("query", "q"), ("key", "k"), ("value", "v")):
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            yield _one(f"{theirs}{place}_proj.{kind}", f"{ours}{name}.{kind}")
    if spec.qk_norm:
        for name in ("q", "k"):
            long = {"q": "query", "k": "key"}[name]
            yield _one(f"{theirs}{name}_norm.weight", f"{ours}{long}_norm.weight")
    yield _one(f"{theirs}o_proj.weight", f"{ours}output.weight")


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


def _mlp(theirs: str, ours: str) -> Iterator[Entry]:
    for name, place in _MATRICES.items():
        yield _one(f"{theirs}{place}.weight", f"{ours}{name}.weight")


def _experts(spec: ModelSpec, names: _ExpertNames, theirs: str, ours: str) -> Iterator[Entry]:
    yield _one(f"{theirs}gate.weight", f"{ours}router.weight")
    if spec.router.expert_bias:
        yield _one(f"{theirs}gate.e_score_correction_bias", f"{ours}router.expert_bias")
    for name, place in names.matrices.items():
        for expert in range(spec.experts):
            part = Part(f"{ours}experts.{name}", expert)
            yield Entry(f"{theirs}experts.{expert}.{place}.weight", (part,))
    if spec.shared_expert_ffn:
        yield from _mlp(f"{theirs}{names.shared}.", f"{ours}shared.")
    if spec.shared_expert_gate:
        yield _one(f"{theirs}shared_expert_gate.weight", f"{ours}shared_gate.weight")
