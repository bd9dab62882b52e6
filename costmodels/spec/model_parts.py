"""The parts of a `ModelSpec`: forms of attention, stretched positions, the choice of experts."""

from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from costmodels.spec.record import Count, CountOrZero, Fraction, NonNegative, Positive, Record

AttentionKind = Literal["full", "window", "chunk", "linear", "compressed", "sparse", "none"]
"""The tokens that a token of a layer attends to.

- full: all tokens before it;
- window: the last `window` tokens;
- chunk: tokens of its own chunk of `window`;
- linear: a state of one size;
- compressed, sparse: a window and entries of `compressed_attention`, all or some of them;
- none: the layer has no attention.
"""

MlpKind = Literal["dense", "experts", "none"]


class LayerKind(NamedTuple):
    """The kinds of attention and MLP of a layer."""

    attention: AttentionKind
    mlp: MlpKind


class LatentAttention(Record):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1); all sizes in elements."""

    q_lora_rank: CountOrZero
    """Rank of the query compression; 0 when queries are projected directly."""
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count

    @property
    def latent_width(self) -> int:
        """Width of what keys and values are made of."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def split_parameters(
        self, hidden: int, heads: int, compressed: "CompressedAttention | None" = None
    ) -> int:
        """Parameters that tensor parallelism splits: of queries, keys, values and output, without biases."""
        qk, values = self.qk_nope_head_dim + self.qk_rope_head_dim, heads * self.v_head_dim
        queries = (self.q_lora_rank or hidden) * heads * qk
        if compressed is not None:
            output = compressed.o_lora_rank * (values + compressed.o_groups * hidden)
            return queries + output
        both = heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + self.kv_lora_rank * both + values * hidden

    def whole_parameters(self, hidden: int, compressed: "CompressedAttention | None" = None) -> int:
        """Parameters that every rank holds: of what compresses inputs, with its norms."""
        norm = self.kv_lora_rank if compressed is None else self.latent_width
        return self.q_lora_rank * (hidden + 1) + hidden * self.latent_width + norm


def windowed_share(seq: int, window: int) -> float:
    """The part of the causal pairs of `seq` tokens that are less than `window` apart, of 1."""
    return 1.0 if window >= seq else (2 * seq - window) * window / seq**2


class CompressedAttention(Record):
    """Compressed latent attention of DeepSeek-V4 (its report, section 2.3); sizes in elements.

    The latents are the one key of all heads, and their value, without a projection back. Beside those of a
    window, layers of kind `compressed` read an entry for every `rate` positions before, and layers of kind
    `sparse` those of the entries for every `sparse_rate` that an indexer chooses. An entry is a mean by
    weights that are projected as its values are; in sparse layers it is of two runs of positions, with
    projections of its own for each. Groups of heads are compressed to `o_lora_rank` before the output.
    """

    rate: Count
    sparse_rate: Count
    o_groups: Count
    o_lora_rank: Count

    def entry_rate(self, kind: AttentionKind) -> int:
        """Positions for which there is an entry in layers of this kind; 0 where there are none."""
        return {"compressed": self.rate, "sparse": self.sparse_rate}.get(kind, 0)

    def projected_width(self, kind: AttentionKind, head_dim: int, indexer: "Indexer") -> int:
        """Width of what entries are made of: values and weights, in sparse layers twice, and those of the
        indexer's keys."""
        return {"compressed": 2 * head_dim, "sparse": 4 * (head_dim + indexer.head_dim)}.get(kind, 0)

    def parameters(self, kind: AttentionKind, hidden: int, head_dim: int, indexer: "Indexer") -> int:
        """Parameters of projections, of a weight for each position of an entry, and of norms of entries."""
        wide = self.projected_width(kind, head_dim, indexer)
        norms = wide // {"compressed": 2, "sparse": 4}.get(kind, 1)
        return wide * hidden + self.entry_rate(kind) * wide // 2 + norms


LoraTarget = Literal["query", "key", "value", "output", "up", "gate", "down"]
"""Linear layers of a block that can have adapters; latent attention has its compressions with them."""

LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)

BaseFormat = Literal["nf4"]
"""Formats of 4 bits that frozen matrices may have."""


class Lora(Record):
    """Low-rank adapters, which train in the place of the model (LoRA, arXiv:2106.09685, section 4.1).

    A linear layer W of the targets becomes W + `alpha` / `rank` B A with A of [`rank`, inputs] and B of
    [outputs, `rank`]. Everything else is frozen.
    """

    rank: Count
    alpha: Positive
    targets: tuple[LoraTarget, ...] = LORA_TARGETS
    quantize_base: BaseFormat | None = None
    """Format of the frozen matrices of all layers that could have adapters (QLoRA, arXiv:2305.14314); that of
    GEMMs if None."""

    @model_validator(mode="after")
    def _check(self) -> "Lora":
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets of lora must name layers once each: {', '.join(LORA_TARGETS)}")
        return self

    @property
    def scale(self) -> float:
        """Factor of what adapters add."""
        return self.alpha / self.rank


class MultiTokenPrediction(Record):
    """Modules that predict tokens further on than the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    Module k takes what module k - 1 (or the model, after its last norm) made of a position, and the embedding
    of the token k further on; it predicts the one after that, by the embedding and the head of the model.
    """

    depths: Count
    """Modules, one after the other (Megatron-LM's `--mtp-num-layers`)."""
    loss_factor: Positive = 0.1
    """Factor of the mean loss of MTP modules in the objective (`--mtp-loss-scaling-factor`)."""


class RopeScaling(Record):
    """Stretching of rotary frequencies for sequences longer than those of pre-training.

    Words and defaults are those of Hugging Face's `rope_scaling`; a field that its kind does not use is
    ignored. Stretching costs no time, and losses depend on it.
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
    def _check(self) -> "RopeScaling":
        if self.kind in ("llama3", "yarn") and not self.original_positions:
            raise ValueError(
                f"rope_scaling {self.kind} needs original_positions, the longest sequence of pre-training"
            )
        if self.kind == "llama3" and self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"rope_scaling llama3: low_freq_factor {self.low_freq_factor:g} must be at most "
                f"high_freq_factor {self.high_freq_factor:g}"
            )
        return self


class ScoreGrowth(Record):
    """Queries at position p, from 0 on, times 1 + `factor` log(1 + floor((p + 1) / `positions`)).

    Llama 4's scaling of attention at inference and in training (arXiv:2501.19399, section 3); it costs
    next to nothing, and losses of long sequences depend on it.
    """

    positions: Count
    factor: Positive


class ExpertLoad(Record):
    """Rows that the experts of the fullest expert-parallel rank take in, over the mean of all."""

    ranks: Count
    mean: Annotated[float, Field(ge=1)]
    """The load of the busiest rank, as a mean of steps and layers: the other ranks wait for it."""
    peak: Annotated[float, Field(ge=1)]
    """The load of the busiest rank in the step and layer where it is largest, mostly early in training:
    memory has to hold it."""


class Router(Record):
    """Choice of experts by tokens."""

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
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
    bias: bool = False
    """The router's matrix has a bias (gpt-oss)."""
    weighs_inputs: bool = False
    """Weights are factors of what goes into experts, not of what they give (Llama 4)."""
    capacity_factor: NonNegative = 0.0
    """An expert takes in at most ceil(S x top_k / experts x factor) tokens of each sequence of S, those with
    the largest weights; 0 for all (dropless)."""
    loads: tuple[ExpertLoad, ...] = ()
    """Measured imbalance of experts, by growing number of expert-parallel ranks; natural routing is assumed
    (`costmodels.layers.expert_load`) where there is none."""
    early: bool = False
    """Routing is that of the first steps, when it is not balanced yet."""

    def load_of(self, ranks: int) -> ExpertLoad | None:
        """The load of `ranks` expert-parallel ranks: that of the most ranks that are not more."""
        return next((load for load in reversed(self.loads) if load.ranks <= ranks), None)


class LinearAttention(Record):
    """Attention whose state has one size for any length of sequence; all sizes in elements.

    `gated_delta`: Gated DeltaNet (arXiv:2412.06464); `mamba2`: Mamba-2 (arXiv:2405.21060), whose groups are
    the key heads, whose states are the keys and whose heads are the value heads here.
    """

    kind: Literal["gated_delta", "mamba2"]
    key_heads: Count
    value_heads: Count
    key_dim: Count
    value_dim: Count
    conv_kernel: Count = 4
    """Positions that a convolution over queries, keys and values covers."""
    conv_bias: bool = False
    chunk: Count = 64
    """Positions that are computed as products of matrices, between which a state is handed on."""

    @property
    def key_size(self) -> int:
        """Width of the concatenated keys (or queries)."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of the concatenated values."""
        return self.value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Width of queries, keys and values together, which the convolution goes over."""
        return 2 * self.key_size + self.value_size

    @property
    def entry_size(self) -> int:
        """Width of what the input is projected to: the above, a gate of the values, and decay (and strength)
        of each head."""
        numbers = 2 if self.kind == "gated_delta" else 1
        return self.conv_size + self.value_size + numbers * self.value_heads

    def parameters(self, hidden: int) -> int:
        """Parameters of one block between `hidden` wide inputs and outputs, its input norm left out."""
        conv = self.conv_size * (self.conv_kernel + self.conv_bias)
        # Decay and step of each head, and Mamba's direct way from input to output.
        heads = self.value_heads * (2 if self.kind == "gated_delta" else 3)
        norm = self.value_dim if self.kind == "gated_delta" else self.value_size
        return hidden * self.entry_size + conv + heads + norm + self.value_size * hidden

    def flops_per_token(self) -> float:
        """Forward FLOPs of one token between the projections, computed in chunks.

        For each head a product of a token with the state and one that adds to it, and within a chunk of C
        tokens scores and weighted values of the half that is causal; the delta rule solves a triangle of
        C x C besides (arXiv:2405.21060, section 6; arXiv:2412.06464, section 3.3).
        """
        state = 4.0 * self.key_dim * self.value_dim
        within = float(self.chunk * (self.key_dim + self.value_dim))
        triangle = within + state / 2 if self.kind == "gated_delta" else 0.0
        return self.value_heads * (state + within + triangle) + 2.0 * self.conv_size * self.conv_kernel


class Indexer(Record):
    """DeepSeek's sparse attention: small heads score all positions, of which attention reads the best.

    DeepSeek-V3.2 (arXiv:2512.02556, section 2.1); sizes in elements, `top_k` in positions.
    """

    heads: Count
    head_dim: Count
    top_k: Count
    share: Fraction = 1.0
    """The share of the layers that choose positions; other layers take what the last one before them chose
    (GLM-5.2)."""

    def share_in(self, kind: AttentionKind, compressed: CompressedAttention | None) -> float:
        """Indexers in the mean of a layer of this kind; of those with entries sparse ones choose."""
        return self.share if compressed is None else float(kind == "sparse")

    def width_in(self, kind: AttentionKind, compressed: CompressedAttention | None) -> float:
        """Width of all heads in the mean of such a layer, for each pair of tokens: of an entry, one position
        is scored."""
        rate = 1 if compressed is None else compressed.sparse_rate
        return self.heads * self.head_dim * self.share_in(kind, compressed) / rate

    def parameters(
        self, kind: AttentionKind, hidden: int, queried: int, compressed: CompressedAttention | None
    ) -> int:
        """Parameters in the mean of such a layer: of queries from `queried` elements, a weight of each head,
        and one key with a layer norm where entries have none."""
        key = (hidden + 2) * self.head_dim if compressed is None else 0
        own = queried * self.heads * self.head_dim + hidden * self.heads + key
        return round(self.share_in(kind, compressed) * own)
