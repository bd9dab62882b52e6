"""The parts of a `ModelSpec`: kinds of attention, scaled positions, routing to experts."""

from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from costmodels.spec.record import Count, CountOrZero, Fraction, NonNegative, Positive, Record

AttentionKind = Literal["full", "window", "chunk", "linear", "compressed", "sparse", "none"]
"""The kind of attention of a layer: the tokens that each token attends to.

- full: all tokens before it;
- window: the last `window` tokens;
- chunk: tokens of the same chunk of `window` tokens;
- linear: a state of fixed size;
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
        """Width of the latent from which keys and values are made."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def split_parameters(
        self, hidden: int, heads: int, compressed: "CompressedAttention | None" = None
    ) -> int:
        """Parameters that tensor parallelism splits: those of queries, keys, values and output, without
        biases."""
        qk, values = self.qk_nope_head_dim + self.qk_rope_head_dim, heads * self.v_head_dim
        queries = (self.q_lora_rank or hidden) * heads * qk
        if compressed is not None:
            output = compressed.o_lora_rank * (values + compressed.o_groups * hidden)
            return queries + output
        both = heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + self.kv_lora_rank * both + values * hidden

    def whole_parameters(self, hidden: int, compressed: "CompressedAttention | None" = None) -> int:
        """Parameters that every rank holds: the matrices that compress inputs, and their norms."""
        norm = self.kv_lora_rank if compressed is None else self.latent_width
        return self.q_lora_rank * (hidden + 1) + hidden * self.latent_width + norm


def windowed_share(seq: int, window: int) -> float:
    """Share of the causal pairs of `seq` tokens with a distance below `window`, 0 to 1."""
    return 1.0 if window >= seq else (2 * seq - window) * window / seq**2


class CompressedAttention(Record):
    """Compressed latent attention of DeepSeek-V4 (its report, section 2.3); sizes in elements.

    The latents are both key and value of all heads, without a projection back. All layers read a window.
    Layers of kind `compressed` also read one entry for every `rate` earlier positions. Layers of kind
    `sparse` also read entries chosen by an indexer, with one entry for every `sparse_rate` positions. An
    entry is a weighted mean; values and weights are projections of the input. In sparse layers an entry
    covers two runs of positions, each with its own projections. Groups of heads are compressed to
    `o_lora_rank` before the output.
    """

    rate: Count
    sparse_rate: Count
    o_groups: Count
    o_lora_rank: Count

    def entry_rate(self, kind: AttentionKind) -> int:
        """Number of positions for each entry in layers of this kind; 0 for layers without entries."""
        return {"compressed": self.rate, "sparse": self.sparse_rate}.get(kind, 0)

    def projected_width(self, kind: AttentionKind, head_dim: int, indexer: "Indexer") -> int:
        """Total width of the projections that make compressed entries: their values and weights (twice in
        sparse layers), and those of the indexer's keys."""
        return {"compressed": 2 * head_dim, "sparse": 4 * (head_dim + indexer.head_dim)}.get(kind, 0)

    def parameters(self, kind: AttentionKind, hidden: int, head_dim: int, indexer: "Indexer") -> int:
        """Parameters of projections, of a weight for each position of an entry, and of entry norms."""
        wide = self.projected_width(kind, head_dim, indexer)
        norms = wide // {"compressed": 2, "sparse": 4}.get(kind, 1)
        return wide * hidden + self.entry_rate(kind) * wide // 2 + norms


LoraTarget = Literal["query", "key", "value", "output", "up", "gate", "down"]
"""Linear layers of a block that can have adapters; in latent attention these include the compressions."""

LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)

BaseFormat = Literal["nf4"]
"""4-bit formats of frozen matrices."""


class Lora(Record):
    """Low-rank adapters, which train instead of the model (LoRA, arXiv:2106.09685, section 4.1).

    A linear layer W of the targets becomes W + `alpha` / `rank` B A with A of [`rank`, inputs] and B of
    [outputs, `rank`]. Everything else is frozen.
    """

    rank: Count
    alpha: Positive
    targets: tuple[LoraTarget, ...] = LORA_TARGETS
    quantize_base: BaseFormat | None = None
    """Format of the frozen matrices of all layers that could have adapters (QLoRA, arXiv:2305.14314); the
    format of GEMMs if None."""

    @model_validator(mode="after")
    def _check(self) -> "Lora":
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets of lora must name layers once each: {', '.join(LORA_TARGETS)}")
        return self

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return self.alpha / self.rank


class MultiTokenPrediction(Record):
    """Modules that predict tokens further on than the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    Module k gets two inputs for a position: the output of module k - 1 (or of the model after its last norm),
    and the embedding of the token k positions later. It predicts the next token after that one, with the
    model's embedding and head.
    """

    depths: Count
    """Number of consecutive modules (Megatron-LM's `--mtp-num-layers`)."""
    loss_factor: Positive = 0.1
    """Factor of the mean loss of MTP modules in the objective (`--mtp-loss-scaling-factor`)."""


class RopeScaling(Record):
    """Scaling of rotary frequencies for sequences longer than those of pre-training.

    Names and defaults are those of Hugging Face's `rope_scaling`; a field that a kind does not use is
    ignored. Scaling takes no time, but losses depend on it.
    """

    kind: str
    """`linear` (arXiv:2306.15595), `llama3` (arXiv:2407.21783, section 3.4.2) or `yarn` (arXiv:2309.00071);
    other kinds can be planned, but not trained."""
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
    """Factor of cosines and sines; 0 for YaRN's derived factor."""
    truncate: bool = True
    """True to round the bounds of YaRN's ramp to whole dimensions."""

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
    """Growth of scores: queries at position p, from 0 on, are multiplied by 1 + `factor` log(1 + floor((p +
    1) / `positions`)).

    Llama 4's scaling of attention at inference and in training (arXiv:2501.19399, section 3); it takes almost
    no time, but losses of long sequences depend on it.
    """

    positions: Count
    factor: Positive


class ExpertLoad(Record):
    """Rows of the experts on the fullest expert-parallel rank, over the mean of all ranks."""

    ranks: Count
    mean: Annotated[float, Field(ge=1)]
    """The load of the busiest rank, as a mean over steps and layers; the other ranks wait for it."""
    peak: Annotated[float, Field(ge=1)]
    """The load of the busiest rank in the step and layer where it is largest, mostly early in training;
    memory must suffice for it."""


class Router(Record):
    """The choice of experts for tokens."""

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalised: bool = True
    """True if the weights of a token's experts add up to one, before `scale`."""
    scale: Positive = 1.0
    """Factor of the weights (DeepSeek's `routed_scaling_factor`)."""
    groups: Count = 1
    """Groups of experts, of which a token may use `top_groups` (DeepSeek-V2, arXiv:2405.04434, 2.2.2)."""
    top_groups: Count = 1
    group_score: Literal["max", "top2"] = "max"
    """Score by which groups are ranked: that of the best expert, or the sum of the two best (DeepSeek-V3)."""
    expert_bias: bool = False
    """True if each expert has a bias that only affects its choice, and follows its load
    (arXiv:2408.15664)."""
    bias: bool = False
    """True if the router's matrix has a bias (gpt-oss)."""
    weighs_inputs: bool = False
    """True if weights multiply the inputs of experts instead of the outputs (Llama 4)."""
    capacity_factor: NonNegative = 0.0
    """Capacity factor: an expert processes at most ceil(S x top_k / experts x factor) tokens of each sequence
    of S tokens, those with the largest weights. 0 for all tokens (dropless)."""
    loads: tuple[ExpertLoad, ...] = ()
    """Measured imbalance of experts, by increasing number of expert-parallel ranks; if empty, natural routing
    is assumed (`costmodels.layers.expert_load`)."""
    early: bool = False
    """True for the routing of the first steps, before it is balanced."""

    def load_of(self, ranks: int) -> ExpertLoad | None:
        """The load for `ranks` expert-parallel ranks: the entry with the most ranks up to that number."""
        return next((load for load in reversed(self.loads) if load.ranks <= ranks), None)


class LinearAttention(Record):
    """Attention with a state of fixed size for any length of sequence; all sizes in elements.

    `gated_delta`: Gated DeltaNet (arXiv:2412.06464); `mamba2`: Mamba-2 (arXiv:2405.21060), whose groups are
    the key heads, whose states are the keys and whose heads are the value heads here.
    """

    kind: Literal["gated_delta", "mamba2"]
    key_heads: Count
    value_heads: Count
    key_dim: Count
    value_dim: Count
    conv_kernel: Count = 4
    """Width of the convolution over queries, keys and values, in positions."""
    conv_bias: bool = False
    chunk: Count = 64
    """Positions of a chunk; a chunk is computed by GEMMs, and the state is passed on between chunks."""

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
        """Width of queries, keys and values together, the input of the convolution."""
        return 2 * self.key_size + self.value_size

    @property
    def entry_size(self) -> int:
        """Width of the input's projections: queries, keys and values, a gate of the values, and decay (and
        strength) of each head."""
        numbers = 2 if self.kind == "gated_delta" else 1
        return self.conv_size + self.value_size + numbers * self.value_heads

    def parameters(self, hidden: int) -> int:
        """Parameters of one block with inputs and outputs of width `hidden`, without its input norm."""
        conv = self.conv_size * (self.conv_kernel + self.conv_bias)
        # Decay and step of each head, and Mamba's direct way from input to output.
        heads = self.value_heads * (2 if self.kind == "gated_delta" else 3)
        norm = self.value_dim if self.kind == "gated_delta" else self.value_size
        return hidden * self.entry_size + conv + heads + norm + self.value_size * hidden

    def flops_per_token(self) -> float:
        """Forward FLOPs of one token between the projections, computed in chunks.

        For each head these are: the product of a token with the state; the token's update of the state;
        within a chunk of C tokens, the causal half of scores and weighted values. The delta rule also solves
        a C x C triangular system (arXiv:2405.21060, section 6; arXiv:2412.06464, section 3.3).
        """
        state = 4.0 * self.key_dim * self.value_dim
        within = float(self.chunk * (self.key_dim + self.value_dim))
        triangle = within + state / 2 if self.kind == "gated_delta" else 0.0
        return self.value_heads * (state + within + triangle) + 2.0 * self.conv_size * self.conv_kernel


class Indexer(Record):
    """DeepSeek's sparse attention: small heads score all positions, and attention reads only the best ones.

    DeepSeek-V3.2 (arXiv:2512.02556, section 2.1); sizes in elements, `top_k` in positions.
    """

    heads: Count
    head_dim: Count
    top_k: Count
    share: Fraction = 1.0
    """The share of the layers that choose positions; other layers reuse the last earlier choice (GLM-5.2)."""

    def share_in(self, kind: AttentionKind, compressed: CompressedAttention | None) -> float:
        """Mean number of indexers in a layer of this kind; among layers with entries, only sparse ones
        choose."""
        return self.share if compressed is None else float(kind == "sparse")

    def width_in(self, kind: AttentionKind, compressed: CompressedAttention | None) -> float:
        """Mean width of all indexer heads of a layer of this kind, for each pair of tokens; an entry counts
        as one position."""
        rate = 1 if compressed is None else compressed.sparse_rate
        return self.heads * self.head_dim * self.share_in(kind, compressed) / rate

    def parameters(
        self, kind: AttentionKind, hidden: int, queried: int, compressed: CompressedAttention | None
    ) -> int:
        """Mean parameters of the indexer of a layer of this kind: queries from `queried` elements, a weight
        of each head, and one key with a layer norm if entries have none."""
        key = (hidden + 2) * self.head_dim if compressed is None else 0
        own = queried * self.heads * self.head_dim + hidden * self.heads + key
        return round(self.share_in(kind, compressed) * own)
