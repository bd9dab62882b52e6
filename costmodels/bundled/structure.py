"""What decides which operations a layer is made of, and the names of the sizes of its tensors."""

from __future__ import annotations

from typing import NamedTuple

from costmodels.spec.layout import ContextParallelForm


class Structure(NamedTuple):
    """Operations of the layers of one model under layouts that differ in sizes only."""

    layernorm: bool
    bias: bool
    qkv_bias: bool
    qk_norm: bool
    rotates: bool
    gated: bool
    activation: str
    wide: bool
    """Activations are fp32."""
    float8: bool = False
    latent: bool = False
    """Latent attention."""
    latent_queries: bool = False
    """Which compresses queries too."""
    longer: str = ""
    """Whose heads are larger than the others': those of keys or of values."""
    scales_scores: bool = False
    """And multiplies queries by a factor."""
    experts: bool = False
    """Routed experts; the fields below say how."""
    exchanges: bool = False
    """Tokens travel to the ranks of their experts."""
    gathers_tokens: bool = False
    """Ranks that share all experts gather their tokens."""
    expert_ranks: int = 1
    """Ranks that share one expert."""
    local_experts: int = 1
    """Of one rank."""
    grouped: bool = True
    """One kernel for the products of all experts."""
    shared_experts: bool = False
    shared_gate: bool = False
    normalised: bool = False
    scaled: bool = False
    biased: bool = False
    one_choice: bool = False
    """Each token has one expert."""
    grouped_choice: bool = False
    """Tokens choose among the experts of some groups."""
    limited: bool = False
    """Experts take in a limited number of tokens."""
    tensor_parallel: bool = False
    sequence_parallel: bool = False
    several: bool = False
    """Micro batches of more than one sequence."""
    shares_heads: bool = False
    """Tensor-parallel ranks share key/value heads."""
    context_form: ContextParallelForm | None = None
    ring_ranks: int = 1
    """Through which keys and values go, as far as that matters."""
    scores_attention: bool = False
    """No kernel fuses attention."""
    one_head: bool = False
    one_key_head: bool = False
    """One head of queries is in attention here, and one of keys and values, in rings, where ranks exchange
    heads, and where scores are tensors."""
    repeats_heads: bool = False
    """Context-parallel ranks that exchange heads first repeat those of keys and values."""
    tied: bool = False
    """Embedding and head are one parameter, and both are here."""
    pads: bool = False
    """The first rank's part of the vocabulary has rows that no token has."""
    recompute: frozenset[str] = frozenset()
    """Modules that backward computes again; "full" for the whole layer."""
    offloads: bool = False
    casts: float = 0.0
    """Bytes of a parameter's gradient in the number format that several micro batches are added up in, over
    those in that of activations, where PyTorch changes it as soon as backward has made it; else 0."""
    single: bool = False
    """No other micro batch adds to these gradients before they are reduced."""

    @property
    def bytes(self) -> int:
        """Of an element of an activation."""
        return 4 if self.wide else 2

    @property
    def alone(self) -> Structure:
        """The same with gradients of one micro batch alone, which stay in their number format until they are
        reduced if that is the narrower one."""
        return self._replace(single=True) if self.casts > 1 else self

    def is_whole(self, name: str) -> bool:
        """Whether tensor-parallel ranks each hold a whole matrix and sum their gradients of it."""
        split = self.tensor_parallel if name in ("router", "shared_gate") else self.sequence_parallel
        return split and name in WHOLE_WEIGHTS

    def is_routed(self, name: str) -> bool:
        """Whether a weight belongs to the routed experts, their router or the gate of shared ones."""
        return name.startswith("expert_") or name in ("router", "shared_gate")

    def is_distributed(self, name: str) -> bool:
        """Whether a weight is a DTensor, of which operations read a part or all."""
        if name.startswith("expert_"):
            return self.exchanges or self.expert_ranks > 1
        return self.sequence_parallel if name == "positions" else self.tensor_parallel

    @property
    def gathered(self) -> int:
        """Ranks whose tokens are sorted here."""
        return self.expert_ranks if self.gathers_tokens else 1


WHOLE_WEIGHTS = ("positions", "latent", "latent_query", "router", "shared_gate")
"""Matrices that tensor-parallel ranks do not split."""

RESIDUAL, WHOLE = ("residual", 1.0), ("whole", 1.0)
"""Activations between layers [B, S, D], of which sequence-parallel ranks hold a part; and all of them."""

QUERY, KEY, VALUE = ("query", 1.0), ("key", 1.0), ("value", 1.0)
"""Of the heads of this rank: queries, keys and values, in the number format of activations."""

ATTENDED = ("attended", 1.0)
"""Results of the heads of this rank."""

INNER = ("inner", 1.0)
"""Of the MLP, of one of its inputs' matrices."""

PAIR, GATHERED_PAIR = ("pair", 1.0), ("gathered_pair", 1.0)
"""Keys and values together: of this rank's tokens, and of all context-parallel ranks."""

WHOLE_PAIR = ("whole_key", 1.0), ("whole_value", 1.0)
"""Keys, and values, of whole sequences."""

REPEATED_KEY, REPEATED_VALUE, TRAVELLING = ("repeated_key", 1.0), ("repeated_value", 1.0), ("travelling", 1.0)
"""Keys and values of heads that are repeated; and queries with them."""

LATENT_QUERY, LATENT, LATENT_KEY = ("latent_query", 1.0), ("latent", 1.0), ("latent_key", 1.0)
"""Of latent attention, for the tokens of this rank: compressed queries; the latent of keys and values with
the rotary key; and without it."""

COMPRESSED, ENTERED = ("compressed", 1.0), ("entered", 1.0)
"""All that is compressed, joined: for the tokens of this rank, and for all tokens."""

ENTERED_QUERY, ENTERED_KEY, ROTARY_PART = ("entered_query", 1.0), ("entered_key", 1.0), ("rotary_part", 1.0)
"""Parts of these: compressed queries and the latent of all tokens, and rotary keys of this rank's tokens."""

KEY_VALUE, ROTARY_QUERY, ROTARY_KEY = ("key_value", 1.0), ("rotary_query", 1.0), ("rotary_key", 1.0)
"""Keys without their rotary part and values; the rotary parts of the queries, and of the key of all heads."""

LOG_SUM_EXP = ("log_sum_exp", 1.0)

ATTENTION_SCORES, ATTENTION_MASK = ("attention_scores", 1.0), ("attention_mask", 1.0)
"""Of all heads of this rank in fp32, and one byte for each query and key of a sequence."""

STATISTICS = ("statistics", 1.0)
"""What a norm keeps besides its input: mean and deviation in fp32, or the latter alone."""

KEY_HEAD = ("key_head", 1.0)
"""Weights of the keys, or values, of a head that tensor-parallel ranks share."""

QUERY_STATISTICS, KEY_STATISTICS = ("query_statistics", 1.0), ("key_statistics", 1.0)
"""The same of norms of queries and keys."""

WIDTH, HEAD_WIDTH = ("width", 1.0), ("head_width", 1.0)
"""A vector of the width of the model, and of one head."""

WEIGHTS = {
    "query": ("query_weight", 1.0),
    "key": ("key_weight", 1.0),
    "value": ("value_weight", 1.0),
    "output": ("output_weight", 1.0),
    "up": ("inner_weight", 1.0),
    "gate": ("inner_weight", 1.0),
    "down": ("inner_weight", 1.0),
    "latent_query": ("latent_query_weight", 1.0),
    "latent": ("latent_weight", 1.0),
    "key_value": ("key_value_weight", 1.0),
    "router": ("router_weight", 1.0),
    "shared_up": ("shared_weight", 1.0),
    "shared_gate_matrix": ("shared_weight", 1.0),
    "shared_down": ("shared_weight", 1.0),
    "shared_gate": WIDTH,
    "expert_up": ("expert_weight", 1.0),
    "expert_gate": ("expert_weight", 1.0),
    "expert_down": ("expert_weight", 1.0),
    "tokens": ("vocabulary_weight", 1.0),
    "positions": ("position_weight", 1.0),
    "head": ("vocabulary_weight", 1.0),
}
"""Gradients of weights as backward makes them, in the number format of activations."""

LATENT_STATISTICS = ("latent_statistics", 1.0)
"""What a norm of what is compressed keeps besides."""

BIASES = {
    "query": ("query_bias", 1.0),
    "key": ("key_bias", 1.0),
    "value": ("value_bias", 1.0),
    "output": WIDTH,
    "up": ("inner_bias", 1.0),
    "gate": ("inner_bias", 1.0),
    "down": WIDTH,
}
"""Gradients of biases."""

EXPERT_BIASES = {
    "expert_up": ("expert_inner_bias", 1.0),
    "expert_gate": ("expert_inner_bias", 1.0),
    "expert_down": ("expert_bias", 1.0),
}

ROUTED, ROUTED_WIDE, TOKENS_OF_RANK = ("routed", 1.0), ("routed_wide", 1.0), ("tokens_of_rank", 1.0)
"""Tokens that a rank routes: as they are, in fp32, and one element of each."""

SCORES, ROUTER_WIDE, PAIR_COUNT = ("scores", 1.0), ("router_wide", 1.0), ("pair_count", 1.0)
"""Scores of experts in fp32, the router's weight in fp32, and one byte for each token and chosen expert."""

PAIR_ROWS, SENT_ROWS, ARRIVED = ("pair_rows", 1.0), ("sent_rows", 1.0), ("arrived", 1.0)
"""Rows: one for each token and chosen expert, those that leave, and those that arrive."""

ROWS, ROW = ("rows", 1.0), ("row", 1.0)
"""Rows that the experts here compute, and one byte of each."""

EXPERT_INNER, SHARED_INNER = ("expert_inner", 1.0), ("shared_inner", 1.0)
"""Inner activations of experts."""

LOGITS_SIZE, EXPONENTS = ("logits", 1.0), ("exponents", 1.0)
"""Of this rank's part of the vocabulary, in the number format of activations; in fp32 without padding."""

TOKEN = ("token", 1.0)
"""One byte a token of the micro batch."""

POSITION = ("position", 1.0)
"""Embedded positions of one sequence, as this rank holds them."""
