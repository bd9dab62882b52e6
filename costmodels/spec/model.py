"""`ModelSpec`: the model to train."""

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from costmodels.spec.model_parts import (
    AttentionKind,
    CompressedAttention,
    Indexer,
    LatentAttention,
    LayerKind,
    LinearAttention,
    Lora,
    MlpKind,
    MultiTokenPrediction,
    RopeScaling,
    Router,
    ScoreGrowth,
    windowed_share,
)
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


MOST_LAYERS = 10_000
"""Most layers that a search supports; the deepest models have some hundreds."""


class Variant(NamedTuple):
    """Layers of one kind among others."""

    share: float
    """Share of the layers, 0 to 1."""
    spec: "ModelSpec"
    """A model with only layers of this kind."""
    mlp: MlpKind


class ModelSpec(Record):
    """A decoder-only transformer. Sizes are in elements, `seq` and `max_positions` in tokens.

    `ffn` is 4 `hidden` where it is not given, `kv_heads` is `heads`, `head_dim` `hidden` / `heads`, and
    `max_positions` is `seq`.

    Examples:
        >>> model = ModelSpec(name="small", layers=12, hidden=768, heads=12, vocab=50257, seq=1024)
        >>> model.ffn, model.kv_heads, model.head_dim, model.max_positions
        (3072, 12, 64, 1024)
    """

    name: Name
    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    hidden: Count
    # Fields that are filled in where they are missing: `default` tells type checkers that they may be.
    ffn: Count = Field(default=...)
    """Inner width of the dense MLP (of one of the two input matrices when `gated`)."""
    heads: Count
    kv_heads: Count = Field(default=...)
    """Key/value heads (query groups); equal to `heads` without grouped-query attention."""
    head_dim: Count = Field(default=...)
    vocab: Count
    """Vocabulary size of the tokenizer, before padding."""
    seq: Count
    """Tokens of one training sample."""
    max_positions: Count = Field(default=...)
    """Longest sequence; the number of rows of a learned position table."""
    gated: bool = False
    activation: Literal["gelu", "gelu_tanh", "silu", "relu2", "clamped_silu"] = "gelu"
    """`clamped_silu`: x sigmoid(1.702 x) times (up + 1), both clamped at 7 (gpt-oss)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_place: Literal["before", "after", "around"] = "before"
    """Place of the norms: before attention and MLP, after them (OLMo 2), or both (Gemma 2, GLM-4)."""
    norm_from_one: bool = False
    """True if weights of norms are stored minus one (Gemma, Qwen3-Next)."""
    norm_eps: Positive = 1e-5
    position: Literal["learned", "rope", "none"] = "learned"
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: CountOrZero = 0
    """Elements of a head with rotary embedding; 0 for all."""
    window_rope_theta: NonNegative = 0.0
    """`rope_theta` of layers with windows, without scaling; 0 for the same as in other layers (Gemma 3)."""
    rotates_full: bool = True
    """True if layers of full attention also have rotary embeddings, in models with other layers too (Llama 4:
    False)."""
    tied: bool = True
    """True if the output head shares the weight of the token embedding."""
    linear_bias: bool = True
    """True for biases on every linear layer of the blocks."""
    qkv_bias: bool = False
    """True for biases on the query, key and value projections when `linear_bias` is false (Qwen 2)."""
    output_bias: bool = False
    """True for a bias on the output of attention when `linear_bias` is false."""
    qk_norm: bool = False
    """True for RMS norms on queries and keys (Qwen 3)."""
    qk_norm_width: Literal["head", "all"] = "head"
    """The values that one norm of `qk_norm` covers: each head, or all heads together (OLMo 2, MiniMax-M2)."""
    qk_norm_weights: bool = True
    """True if the norms of queries and keys have weights; norms without weights are only in layers with
    rotary embeddings (Llama 4)."""
    attention_gate: bool = False
    """True if a sigmoid of the input scales each element of attention's output (Qwen3-Next)."""
    attention_sinks: bool = False
    """True if each head has a learned score that takes part in the softmax without a value (gpt-oss)."""
    attention_softcap: NonNegative = 0.0
    """The cap c of attention scores x, which become c tanh(x / c); 0 for no cap (Gemma 2)."""
    logits_softcap: NonNegative = 0.0
    score_scale: NonNegative = 0.0
    """Factor of scores; 0 for 1 / sqrt(`head_dim`)."""
    score_growth: ScoreGrowth | None = None
    """Growth of scores with positions, in layers whose heads have no rotary embedding (Llama 4)."""
    embedding_scale: Positive = 1.0
    residual_scale: Positive = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual (Granite)."""
    logits_scale: Positive = 1.0
    parallel_residual: bool = False
    """True if attention and MLP both read the layer's input, each after its own norm (GPT-NeoX)."""
    residual_streams: Count = 1
    """Number of parallel residual streams, which hyper-connections mix before and after attention and MLP
    (arXiv:2512.24880). Their parameters are in `other_layer_parameters` and `other_parameters`."""
    window: CountOrZero = 0
    """Tokens that attention reads in layers of kind `window` or `chunk`."""
    attention_pattern: tuple[AttentionKind, ...] = ("full",)
    """Kinds of attention of consecutive layers; the pattern repeats."""
    mlp_pattern: tuple[MlpKind, ...] = ()
    """Kinds of MLP of consecutive layers; the pattern repeats. If empty, all layers after `dense_layers` have
    experts, or all are dense in a model without experts."""
    linear_attention: LinearAttention | None = None
    indexer: Indexer | None = None
    experts: CountOrZero = 0
    """Routed experts of a mixture-of-experts layer; 0 for a dense model."""
    top_k: CountOrZero = 0
    expert_ffn: CountOrZero = 0
    """Inner width of one routed expert."""
    shared_expert_ffn: CountOrZero = 0
    """Inner width of all shared experts of a layer together."""
    shared_expert_gate: bool = False
    """True if a sigmoid of each token scales the output of its shared experts (Qwen 2)."""
    router: Router = Router()
    dense_layers: CountOrZero = 0
    """Leading layers that keep the dense MLP in a mixture-of-experts model."""
    latent_attention: LatentAttention | None = None
    compressed_attention: CompressedAttention | None = None
    mtp_layers: CountOrZero = 0
    """Number of MTP modules in the published weights; a job trains those of `mtp`."""
    other_layer_parameters: CountOrZero = 0
    """Further parameters of every layer, beyond all other fields; they count as parameters of a matrix."""
    other_parameters: CountOrZero = 0
    """Further parameters outside of layers, beyond all other fields, such as additional embeddings."""
    lora: Lora | None = None
    """Adapters that train while the model is frozen; `parameters` does not include them."""
    mtp: MultiTokenPrediction | None = None
    """MTP modules after the layers; `parameters` does not include them."""
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
    def _check(self) -> "ModelSpec":
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
        self._check_kinds()
        if self.shared_expert_gate and not self.shared_expert_ffn:
            raise ValueError("shared_expert_gate needs shared experts; set shared_expert_ffn")
        self._check_lora()
        if self.mtp is not None:
            self._check_mtp()
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers {self.dense_layers} exceeds layers {self.layers}")
        if self.parameters > LARGEST_COUNT:
            raise ValueError(
                f"hidden {self.hidden}, ffn {self.ffn}, vocab {self.vocab} and the like make "
                f"{float(self.parameters):.3g} parameters; at most {LARGEST_COUNT:.3g} are priced"
            )
        return self

    def _check_mtp(self) -> None:
        kind = self.layer_kind(self.layers - 1)
        if self.position == "learned":
            raise ValueError("mtp: tokens further on have no learned positions; use position rope or none")
        if self.lora is not None:
            raise ValueError("mtp trains all weights, and lora adapters alone; ask for one of them")
        if "none" in kind:
            raise ValueError("mtp needs a last layer of attention and MLP, which its modules are like")
        if self.mtp is not None and self.mtp.depths >= self.seq:
            raise ValueError(f"mtp of {self.mtp.depths} depths needs samples of more tokens than {self.seq}")

    def _check_lora(self) -> None:
        if self.lora is not None and self.compressed_attention is not None:
            raise ValueError("lora: layers of compressed_attention have no adapters")
        if self.lora is None or not self.routed_layers or self.shared_expert_ffn:
            return
        if {*self.lora.targets} <= {"up", "gate", "down"}:
            raise ValueError(
                f"targets of lora {', '.join(self.lora.targets)}: routed experts have no adapters, and the "
                "model has no shared ones; add one of query, key, value or output"
            )

    def _check_kinds(self) -> None:
        patterns = {*self.attention_pattern}, {*self.mlp_pattern}
        if not self.attention_pattern:
            raise ValueError("attention_pattern is empty: give the kind of one layer at least, such as full")
        if patterns[0] & {"window", "chunk"} and not self.window:
            raise ValueError("layers that attend to a window need window, its tokens")
        if "linear" in patterns[0] and self.linear_attention is None:
            raise ValueError("layers of kind linear need the sizes of linear_attention")
        if self.parallel_residual and (self.norm_place != "before" or self.residual_streams > 1):
            raise ValueError("parallel_residual has one residual, with norms before attention and MLP")
        if self.activation == "clamped_silu" and not self.gated:
            raise ValueError("activation clamped_silu has a gate; set gated")
        if "experts" in patterns[1] and not self.experts:
            raise ValueError("mlp_pattern has layers of experts, and experts is 0")
        if self.latent_attention is None and (self.indexer or self.compressed_attention) is not None:
            raise ValueError("indexer and compressed_attention belong to latent_attention, which is missing")
        if patterns[0] & {"compressed", "sparse"} and not (self.compressed_attention and self.indexer):
            raise ValueError("layers of kind compressed or sparse need compressed_attention and an indexer")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}"
            )

    @property
    def is_uniform(self) -> bool:
        """True if all layers after the leading dense ones are of one kind."""
        return len(self.attention_pattern) == 1 and len(self.mlp_pattern) <= 1

    def layer_kind(self, layer: int) -> LayerKind:
        """The kinds of attention and MLP of layer number `layer`."""
        attention = self.attention_pattern[layer % len(self.attention_pattern)]
        if layer < self.dense_layers or not (self.mlp_pattern or self.experts):
            return LayerKind(attention, "dense")
        if not self.mlp_pattern:
            return LayerKind(attention, "experts")
        return LayerKind(attention, self.mlp_pattern[layer % len(self.mlp_pattern)])

    def with_attention(self, kind: AttentionKind) -> "ModelSpec":
        """The model with this kind of attention in all layers."""
        same = self.attention_pattern == (kind,)
        return self if same else self.model_copy(update={"attention_pattern": (kind,)})

    def reaches_all(self, kind: AttentionKind) -> bool:
        """Return whether each token of a layer of this kind attends to all tokens before it."""
        return kind not in ("window", "chunk") or self.window >= self.seq

    def turned_by(self, kind: AttentionKind) -> tuple[float, RopeScaling | None] | None:
        """Base and scaling of the rotary embedding in layers of this kind; None for layers without one."""
        is_limited = kind in ("window", "chunk")
        sees_all = kind in ("full", "compressed", "sparse")
        if self.position != "rope" or not (is_limited or (sees_all and self.rotates_full)):
            return None
        own = is_limited and self.window_rope_theta
        return (self.window_rope_theta, None) if own else (self.rope_theta, self.rope_scaling)

    def norms_heads(self, kind: AttentionKind) -> bool:
        """Return whether queries and keys have norms in layers of this kind."""
        return self.qk_norm and (self.qk_norm_weights or self.turned_by(kind) is not None)

    @property
    def leading_layers(self) -> int:
        """Number of layers before the first one with experts; all layers in a model without experts."""
        if not self.experts:
            return self.layers
        if not self.mlp_pattern:
            return self.dense_layers
        kinds = (layer for layer in range(self.layers) if self.layer_kind(layer).mlp == "experts")
        return next(kinds, self.layers)

    @property
    def routed_layers(self) -> int:
        """Number of layers from the first one with experts on."""
        return self.layers - self.leading_layers

    def variants(self, leading: bool) -> list[Variant]:
        """The kinds of layers among the leading ones, or among the others, with their shares."""
        first = self.leading_layers
        if self.is_uniform and not self.mlp_pattern:
            return [Variant(1.0, self, "dense" if leading else "experts")]
        part = range(first) if leading else range(first, self.layers)
        counts: dict[LayerKind, int] = {}
        for kind in map(self.layer_kind, part or (0,)):
            counts[kind] = counts.get(kind, 0) + 1
        return [
            Variant(
                count / max(1, len(part)),
                self.with_attention(kind.attention).model_copy(update={"mlp_pattern": ()}),
                kind.mlp,
            )
            for kind, count in counts.items()
        ]

    def mean(self, quantity: Any, leading: bool) -> Any:
        """The mean over the leading layers, or over the others, of `quantity(spec, mlp)`."""
        every = [(share, quantity(spec, mlp)) for share, spec, mlp in self.variants(leading)]
        return every[0][1] if len(every) == 1 else sum(share * value for share, value in every)

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
        """Number of layers whose MLP is a mixture of experts."""
        if not (self.experts and self.mlp_pattern):
            return self.layers - self.dense_layers if self.experts else 0
        return sum(self.layer_kind(layer).mlp == "experts" for layer in range(self.layers))

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of width `hidden`."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    def norms(self, kind: LayerKind) -> int:
        """Number of norms of width `hidden` in a layer."""
        blocks = (kind.attention != "none") + (kind.mlp != "none")
        return blocks * (2 if self.norm_place == "around" else 1)

    def attention_parameters(self, kind: AttentionKind = "full") -> int:
        """Parameters of one attention block, without its norms of width `hidden`."""
        h, mla = self.hidden, self.latent_attention
        if kind == "none":
            return 0
        if kind == "linear":
            assert self.linear_attention is not None
            return self.linear_attention.parameters(h)
        if mla is not None:
            compressed = self.compressed_attention
            found = mla.split_parameters(h, self.heads, compressed) + mla.whole_parameters(h, compressed)
            found += h * self.linear_bias + self.heads * self.attention_sinks
            return found + self.chooser_parameters(kind)
        weights = h * (self.q_size * (1 + self.attention_gate) + 2 * self.kv_size) + self.q_size * h
        biases = (self.q_size + 2 * self.kv_size) * (self.linear_bias or self.qkv_bias)
        biases += h * (self.linear_bias or self.output_bias)
        norms = self.q_size + self.kv_size if self.qk_norm_width == "all" else 2 * self.head_dim
        norms *= self.qk_norm and self.qk_norm_weights
        return weights + biases + norms + self.heads * self.attention_sinks

    def index_width(self, kind: AttentionKind) -> float:
        """Total width of an indexer's heads for each pair of tokens, as a mean over layers."""
        return 0.0 if self.indexer is None else self.indexer.width_in(kind, self.compressed_attention)

    def chooser_parameters(self, kind: AttentionKind) -> int:
        """Parameters of indexer and compressed entries, as a mean over layers with latent attention."""
        h, mla, indexer, entries = self.hidden, self.latent_attention, self.indexer, self.compressed_attention
        if mla is None or indexer is None:
            return 0
        found = indexer.parameters(kind, h, mla.q_lora_rank or h, entries)
        return found + (0 if entries is None else entries.parameters(kind, h, mla.latent_width, indexer))

    def mlp_parameters(self, width: int) -> int:
        """Parameters of one MLP of inner width `width`."""
        inputs = 2 if self.gated else 1
        return (inputs + 1) * self.hidden * width + self.linear_bias * (inputs * width + self.hidden)

    def layer_parameters(self, kind: LayerKind, experts: int | None = None) -> int:
        """Parameters of one layer, with all its routed experts or with `experts` of them."""
        found = self.attention_parameters(kind.attention) + self.norms(kind) * self.norm_parameters
        found += self.other_layer_parameters
        if kind.mlp == "dense":
            return found + self.mlp_parameters(self.ffn)
        if kind.mlp == "none":
            return found
        shared = self.mlp_parameters(self.shared_expert_ffn) if self.shared_expert_ffn else 0
        router = (self.hidden + self.router.bias) * self.experts + self.hidden * self.shared_expert_gate
        routed = self.experts if experts is None else experts
        return found + shared + router + routed * self.mlp_parameters(self.expert_ffn)

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of one layer with a dense MLP and the first layer's attention."""
        return self.layer_parameters(LayerKind(self.attention_pattern[0], "dense"))

    @property
    def shared_moe_layer_parameters(self) -> int:
        """Parameters of one layer with experts and the first layer's attention, without routed experts."""
        return self.layer_parameters(LayerKind(self.attention_pattern[0], "experts"), experts=0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token and position embeddings, without padding."""
        positions = self.max_positions if self.position == "learned" else 0
        return (self.vocab + positions) * self.hidden

    @property
    def mtp_depths(self) -> int:
        """Number of trained MTP modules."""
        return 0 if self.mtp is None else self.mtp.depths

    @property
    def may_hide_dispatch(self) -> bool:
        """True if Megatron-Core may hide dispatch behind passes of another microbatch: with one MTP module at
        most (`transformer_config.py`, overlap_moe_expert_parallel_comm)."""
        return self.mtp_depths <= 1

    @property
    def mtp_module(self) -> "ModelSpec":
        """A model whose layers all equal this model's last layer, which is also the layer of each MTP
        module."""
        return self.with_attention(self.layer_kind(self.layers - 1).attention)

    @property
    def mtp_parameters(self) -> int:
        """Parameters of all MTP modules, which share embedding and head with the model."""
        own = 2 * self.hidden**2 + 3 * self.norm_parameters
        return self.mtp_depths * (own + self.layer_parameters(self.layer_kind(self.layers - 1)))

    def _all_layers(self, experts: int | None = None) -> int:
        if self.is_uniform and not self.mlp_pattern:
            attention = self.attention_pattern[0]
            dense = self.layer_parameters(LayerKind(attention, "dense"))
            routed = self.layer_parameters(LayerKind(attention, "experts"), experts) if self.experts else 0
            return (self.layers - self.moe_layers) * dense + self.moe_layers * routed
        kinds = (self.layer_kind(layer) for layer in range(self.layers))
        return sum(self.layer_parameters(kind, experts) for kind in kinds)

    @property
    def parameters(self) -> int:
        """All parameters, without vocabulary padding."""
        head = 0 if self.tied else self.vocab * self.hidden
        ends = self.embedding_parameters + self.norm_parameters + head + self.other_parameters
        return ends + self._all_layers()

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses (`top_k` of the experts)."""
        return self.parameters - self._all_layers() + self._all_layers(self.top_k)

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Stored vocabulary rows: the next multiple of 128 that `tensor_parallel` divides.

        Powers of two up to 128 give the same table, so checkpoints fit every such layout. (Megatron-LM pads
        to 128 x tp, so its shape changes with the layout.)
        """
        multiple = math.lcm(VOCAB_MULTIPLE, tensor_parallel)
        return -(-self.vocab // multiple) * multiple

    def score_share(self, kind: AttentionKind = "full") -> float:
        """Share of all causal pairs of tokens whose scores attention computes, 0 to 1.

        Positions chosen by an indexer count as a window of the same size, and an entry as one position.
        """
        s, window, compressed = self.seq, self.window, self.compressed_attention
        if kind == "chunk" and window < s:
            whole, rest = divmod(s, window)
            return (whole * window**2 + rest**2) / s**2
        chosen = self.indexer.top_k if self.index_width(kind) and self.indexer is not None else s
        rate = 0 if compressed is None else compressed.entry_rate(kind)
        if rate:
            return windowed_share(s, window or s) + windowed_share(s, chosen * rate) / rate
        return windowed_share(s, window if kind in ("window", "chunk") else chosen)
