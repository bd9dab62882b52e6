"""`ModelSpec`: what is trained."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from costmodels.spec.record import (
    LARGEST_COUNT,
    Count,
    CountOrZero,
    Name,
    NonNegative,
    Positive,
    Record,
    Sentence,
)

VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this, as Megatron-LM does (`--make-vocab-size-divisible-by`)."""


class LatentAttention(Record):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1); all sizes in elements."""

    q_lora_rank: CountOrZero
    """Rank of the query compression; 0 when queries are projected directly."""
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


class RopeScaling(Record):
    """How rotary frequencies are stretched for sequences longer than those of pre-training.

    Words and defaults are those of Hugging Face's `rope_scaling`; a field that its kind does not use is
    ignored. It costs nothing, and losses depend on it.
    """

    kind: str
    """`linear` (arXiv:2306.15595), `llama3` (arXiv:2407.21783, section 3.4.2) or `yarn` (arXiv:2309.00071);
    others can be planned, not trained."""
    factor: Positive = 1.0
    original_positions: CountOrZero = 0
    """Longest sequence of pre-training; 0 when the kind needs none."""
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: NonNegative = 0.0
    mscale_all_dim: NonNegative = 0.0
    attention_factor: NonNegative = 0.0
    """Factor of cosines and sines; 0 for the one that YaRN derives."""
    truncate: bool = True
    """Round the bounds of YaRN's ramp to whole dimensions."""

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.kind in ("llama3", "yarn") and not self.original_positions:
            raise ValueError(
                f"rope_scaling {self.kind} needs original_positions, the longest sequence of pre-training"
            )
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope_scaling llama3: low_freq_factor {self.low_freq_factor:g} must be less than "
                f"high_freq_factor {self.high_freq_factor:g}"
            )
        return self


class Router(Record):
    """Choice of experts by tokens."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """The weights of a token's experts add up to one, before `scale`."""
    scale: Positive = 1.0
    """Factor of the weights (DeepSeek's `routed_scaling_factor`)."""
    groups: Count = 1
    """Groups of experts, of which a token may use `top_groups` (DeepSeek-V2, arXiv:2405.04434, 2.2.2)."""
    top_groups: Count = 1
    group_score: Literal["max", "top2"] = "max"
    """Score that ranks groups: their best expert, or the sum of the two best (DeepSeek-V3)."""
    expert_bias: bool = False
    """A bias of each expert that takes part in the choice only and follows its load (arXiv:2408.15664)."""
    capacity_factor: NonNegative = 0.0
    """An expert takes in at most ceil(S x top_k / experts x factor) tokens of each sequence of S, those with
    the largest weights; 0 for all (dropless)."""


MOST_LAYERS = 10_000
"""Layers that a search still goes through; the deepest models have some hundreds."""


class ModelSpec(Record):
    """A decoder-only transformer. Sizes are in elements, `seq` and `max_positions` in tokens.

    `ffn` is 4 `hidden` where it is not given, `kv_heads` is `heads`, `head_dim` `hidden` / `heads`, and
    `max_positions` is `seq`.
    """

    name: Name
    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    hidden: Count
    # What is filled in where it is missing: `default` tells type checkers that it may be.
    ffn: Count = Field(default=...)
    """Inner width of the dense MLP (of one of the two input matrices when `gated`)."""
    heads: Count
    kv_heads: Count = Field(default=...)
    """Key/value heads (query groups); equal to `heads` without grouped-query attention."""
    head_dim: Count = Field(default=...)
    vocab: Count
    """Entries of the tokenizer, before any padding."""
    seq: Count
    """Tokens of one training sample."""
    max_positions: Count = Field(default=...)
    """Longest sequence; the number of rows of a learned position table."""
    gated: bool = False
    activation: Literal["gelu", "gelu_tanh", "silu", "relu2"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: Positive = 1e-5
    position: Literal["learned", "rope", "none"] = "learned"
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = True
    """The output head shares the weight of the token embedding."""
    linear_bias: bool = True
    """Biases on every linear layer of the blocks."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections when `linear_bias` is false (Qwen 2)."""
    qk_norm: bool = False
    """RMS norms of `head_dim` on queries and keys (Qwen 3)."""
    experts: CountOrZero = 0
    """Routed experts of a mixture-of-experts layer; 0 for a dense model."""
    top_k: CountOrZero = 0
    expert_ffn: CountOrZero = 0
    """Inner width of one routed expert."""
    shared_expert_ffn: CountOrZero = 0
    """Inner width of all shared experts of a layer together."""
    shared_expert_gate: bool = False
    """A sigmoid of each token scales what its shared experts give (Qwen 2)."""
    router: Router = Router()
    dense_layers: CountOrZero = 0
    """Leading layers that keep the dense MLP in a mixture-of-experts model."""
    latent_attention: LatentAttention | None = None
    published_parameters: CountOrZero = 0
    """Parameter count that the model's authors state; 0 when none is published."""
    source: Sentence = ""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        if "kv_heads" not in filled and "heads" in filled:
            filled["kv_heads"] = filled["heads"]
        hidden, heads = filled.get("hidden"), filled.get("heads")
        # A size that is missing or of the wrong type is left for its own field's validation.
        if "ffn" not in filled and isinstance(hidden, int):
            filled["ffn"] = 4 * hidden
        if "head_dim" not in filled and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            if hidden % heads:
                raise ValueError(
                    f"hidden {hidden} is not divisible by heads {heads}; "
                    f"choose a divisor of {hidden} or state head_dim"
                )
            filled["head_dim"] = hidden // heads
        if "max_positions" not in filled and "seq" in filled:
            filled["max_positions"] = filled["seq"]
        return filled

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.seq > self.max_positions:
            raise ValueError(f"seq {self.seq} is longer than max_positions {self.max_positions}")
        if self.experts and not (0 < self.top_k <= self.experts and self.expert_ffn):
            raise ValueError(
                f"a model of {self.experts} experts needs expert_ffn and a top_k of 1 to {self.experts}"
            )
        groups, top_groups = self.router.groups, self.router.top_groups
        if self.experts and (self.experts % groups or top_groups > groups):
            raise ValueError(
                f"router groups {groups} must divide experts {self.experts}, and top_groups {top_groups} "
                "must be at most as many"
            )
        if self.experts and self.top_k > self.experts // groups * top_groups:
            raise ValueError(
                f"top_k {self.top_k} is more than the experts of {top_groups} of {groups} router groups"
            )
        if self.router.group_score == "top2" and groups > 1 and self.experts // groups < 2:
            raise ValueError(f"router group_score top2 needs two experts in each of the {groups} groups")
        if self.shared_expert_gate and not self.shared_expert_ffn:
            raise ValueError("shared_expert_gate needs shared experts; set shared_expert_ffn")
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers {self.dense_layers} exceeds layers {self.layers}")
        if self.parameters > LARGEST_COUNT:
            raise ValueError(
                f"hidden {self.hidden}, ffn {self.ffn}, vocab {self.vocab} and the like make "
                f"{float(self.parameters):.3g} parameters; at most {LARGEST_COUNT:.3g} are priced"
            )
        return self

    @property
    def q_size(self) -> int:
        """Width of the concatenated queries."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the concatenated keys (or values)."""
        return self.kv_heads * self.head_dim

    @property
    def moe_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of width `hidden`."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention block, its input norm left out."""
        h, mla = self.hidden, self.latent_attention
        if mla is not None:
            qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
            queries = (
                h * mla.q_lora_rank + mla.q_lora_rank + mla.q_lora_rank * self.heads * qk_dim
                if mla.q_lora_rank
                else h * self.heads * qk_dim
            )
            latents = h * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
            keys_values = mla.kv_lora_rank * self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
            output = self.heads * mla.v_head_dim * h + h * self.linear_bias
            return queries + latents + keys_values + output
        weights = h * (self.q_size + 2 * self.kv_size) + self.q_size * h
        biases = (self.q_size + 2 * self.kv_size) * (self.linear_bias or self.qkv_bias)
        biases += h * self.linear_bias
        return weights + biases + 2 * self.head_dim * self.qk_norm

    def mlp_parameters(self, width: int) -> int:
        """Parameters of one MLP of inner width `width`."""
        inputs = 2 if self.gated else 1
        return (inputs + 1) * self.hidden * width + self.linear_bias * (inputs * width + self.hidden)

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of one layer with a dense MLP, norms included."""
        return self.attention_parameters + self.mlp_parameters(self.ffn) + 2 * self.norm_parameters

    @property
    def shared_moe_layer_parameters(self) -> int:
        """Parameters of one mixture-of-experts layer outside its routed experts."""
        shared = self.mlp_parameters(self.shared_expert_ffn) if self.shared_expert_ffn else 0
        shared += self.hidden * self.shared_expert_gate
        return self.attention_parameters + shared + self.hidden * self.experts + 2 * self.norm_parameters

    @property
    def moe_layer_parameters(self) -> int:
        """Parameters of one mixture-of-experts layer with all its experts."""
        return self.shared_moe_layer_parameters + self.experts * self.mlp_parameters(self.expert_ffn)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token and position embeddings, without padding."""
        positions = self.max_positions if self.position == "learned" else 0
        return (self.vocab + positions) * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, without vocabulary padding."""
        head = 0 if self.tied else self.vocab * self.hidden
        dense = (self.layers - self.moe_layers) * self.dense_layer_parameters
        moe = self.moe_layers * self.moe_layer_parameters if self.experts else 0
        return self.embedding_parameters + dense + moe + self.norm_parameters + head

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through (`top_k` of the experts)."""
        idle = self.moe_layers * (self.experts - self.top_k) * self.mlp_parameters(self.expert_ffn)
        return self.parameters - (idle if self.experts else 0)

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Vocabulary rows that are stored: the next multiple of 128 that `tensor_parallel` divides.

        Powers of two up to 128 therefore store the same table, so checkpoints fit every such layout
        (Megatron-LM pads to 128 x tp instead, which changes the shape with the layout).
        """
        multiple = math.lcm(VOCAB_MULTIPLE, tensor_parallel)
        return -(-self.vocab // multiple) * multiple

    def flops_per_sequence(self) -> float:
        """Model FLOPs of forward and backward for one sequence of `seq` tokens.

        Megatron-LM's convention since core 0.12 (training.py `num_floating_point_operations`): 6 per
        matmul weight and token, causal half of the core attention, no recomputation, no router.
        """
        s, h = self.seq, self.hidden
        mla = self.latent_attention
        if mla is not None:
            projections = self.attention_parameters
            qk, v = self.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), self.heads * mla.v_head_dim
        else:
            projections = h * (self.q_size + 2 * self.kv_size) + self.q_size * h
            qk = v = self.q_size
        matrices = 3 if self.gated else 2
        dense = (self.layers - self.moe_layers) * matrices * h * self.ffn
        moe = self.moe_layers * matrices * h * (self.top_k * self.expert_ffn + self.shared_expert_ffn)
        weights = self.layers * projections + dense + moe + h * self.vocab
        return 6.0 * s * weights + 3.0 * s * s * (qk + v) * self.layers
