"""Changes to a model by the flags of experts and of latent attention."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any, ClassVar

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import LatentAttention, Router
from planner.options.flags import flag, flag_names
from planner.options.limits import MOST, POSITIVE, Bounds

MOST_LAYERS = 100_000
"""Most layers of a pattern of layers; a longer one is refused before it is expanded."""


@dataclass(frozen=True)
class ExpertFlags:
    """A mixture of experts, with Megatron-LM's meanings and defaults."""

    SECTIONS: ClassVar[dict[str, str]] = {"num_experts": "Experts"}

    num_experts: int | None = flag(None, "Routed experts of a mixture of experts; 0 for a dense model.")
    moe_router_topk: int | None = flag(None, "Experts of each token; 2 unless given.")
    moe_ffn_hidden_size: int | None = flag(None, "Inner width of one expert; that of the MLP unless given.")
    moe_shared_expert_intermediate_size: int | None = flag(None, "Inner width of all shared experts.")
    moe_shared_expert_gate: bool = flag(False, "A sigmoid of each token scales its shared experts.")
    moe_layer_freq: str | None = flag(
        None, "Layers with experts: 1 for all, or a list with 0 for each dense layer, such as ([0]*3+[1]*58)."
    )
    moe_router_score_function: str | None = flag(None, "softmax or sigmoid; softmax unless given.")
    moe_router_pre_softmax: bool = flag(False, "Softmax over all experts, not over the chosen ones.")
    moe_router_topk_scaling_factor: float | None = flag(
        None, "Factor of the weights of experts.", within=POSITIVE
    )
    moe_router_num_groups: int | None = flag(
        None, "Number of groups into which experts are divided; a token uses a few of them."
    )
    moe_router_group_topk: int | None = flag(None, "Number of groups of experts that a token uses.")
    moe_router_enable_expert_bias: bool = flag(False, "Biases that balance the load without a loss.")
    moe_expert_capacity_factor: float | None = flag(
        None,
        "Most tokens that an expert takes, as a multiple of an even load; no limit unless given, or if "
        "negative.",
        within=Bounds("a number such as 1.25", -MOST),
    )
    moe_load_imbalance: str | None = flag(
        None,
        "Load of the fullest expert-parallel rank as a multiple of the mean, such as 1.2; 1 is forced "
        "balance. Or the metrics.jsonl of a run (also used for memory), or early for a router that has not "
        "learned to balance. Natural routing is assumed unless given.",
        metavar="X",
    )


@dataclass(frozen=True)
class LatentFlags:
    """Multi-head latent attention, with Megatron-LM's meanings and defaults."""

    SECTIONS: ClassVar[dict[str, str]] = {"multi_latent_attention": "Latent attention"}

    multi_latent_attention: bool = flag(False, "Attend through compressed keys and values.")
    q_lora_rank: int | None = flag(None, "Rank of compressed queries; not compressed unless given.")
    kv_lora_rank: int | None = flag(None, "Rank of compressed keys and values; 32 unless given.")
    qk_head_dim: int | None = flag(None, "Width of a query without its rotary part; 128 unless given.")
    qk_pos_emb_head_dim: int | None = flag(None, "Width of the rotary part of a query; 64 unless given.")
    v_head_dim: int | None = flag(None, "Width of a value; 128 unless given.")


def expert_changes(flags: ExpertFlags, base: ModelSpec | None, layers: int) -> dict[str, Any]:
    """Fields of `ModelSpec` that the flags of experts set.

    Raises `InputError` for values that Megatron-LM refuses too, or that no layer here has.
    """
    given = {
        "experts": flags.num_experts,
        "top_k": flags.moe_router_topk,
        "expert_ffn": flags.moe_ffn_hidden_size,
        "shared_expert_ffn": flags.moe_shared_expert_intermediate_size,
    }
    usual = base if base is not None and base.experts else None
    if flags.num_experts == 0:
        return _without_experts(flags, usual)
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    words = _given(ExpertFlags, flags)
    if words and not (flags.num_experts or usual):
        raise InputError(f"{words[0]} needs a mixture of experts; give --num-experts too")
    top_k = flags.moe_router_topk or (usual.top_k if usual is not None else 2)
    if words:
        _check_ranges(flags, flags.num_experts or (usual.experts if usual is not None else 0), top_k)
    if flags.moe_shared_expert_gate:
        changes["shared_expert_gate"] = True
    if flags.moe_layer_freq is not None:
        changes["dense_layers"] = _leading_dense(flags.moe_layer_freq, layers)
    router = _router_changes(flags, usual, top_k)
    if router:
        changes["router"] = (usual.router.model_dump() if usual is not None else {}) | router
    return changes


EXPERT_FIELDS = (
    "experts",
    "top_k",
    "expert_ffn",
    "shared_expert_ffn",
    "shared_expert_gate",
    "router",
    "dense_layers",
)
"""Fields of `ModelSpec` that a dense model leaves at their defaults."""


def _without_experts(flags: ExpertFlags, usual: ModelSpec | None) -> dict[str, Any]:
    """Changes that turn `usual`, a mixture of experts or None, into a dense model."""
    others = [word for word in _given(ExpertFlags, flags) if word != "--num-experts"]
    if others:
        raise InputError(f"{others[0]} needs a mixture of experts, and --num-experts 0 is none; give one")
    if usual is None:
        return {}
    return {name: ModelSpec.model_fields[name].default for name in EXPERT_FIELDS}


def _check_ranges(flags: ExpertFlags, experts: int, top_k: int) -> None:
    for name, value, least in (
        ("--num-experts", flags.num_experts, 0),
        ("--moe-router-topk", flags.moe_router_topk, 1),
        ("--moe-ffn-hidden-size", flags.moe_ffn_hidden_size, 1),
        ("--moe-shared-expert-intermediate-size", flags.moe_shared_expert_intermediate_size, 0),
        ("--moe-router-num-groups", flags.moe_router_num_groups, 1),
        ("--moe-router-group-topk", flags.moe_router_group_topk, 1),
    ):
        if value is not None and value < least:
            raise InputError(f"{name} {value}: expected a whole number of at least {least}")
    if top_k > experts and flags.moe_router_topk is not None:
        raise InputError(f"--moe-router-topk {top_k}: expected 1 to {experts}, the number of experts")
    if top_k > experts:
        raise InputError(
            f"--num-experts {experts}: each token uses {top_k} of them; give --moe-router-topk too"
        )


EARLY = "early"
"""Value of `--moe-load-imbalance` for a router that has not learned to balance."""


def _given(group: type, flags: object) -> list[str]:
    """The names of the flags of `group` that are given."""
    every = dataclasses.fields(group)
    return [flag_names(field)[0] for field in every if getattr(flags, field.name) != field.default]


def _router_changes(flags: ExpertFlags, base: ModelSpec | None, top_k: int) -> dict[str, Any]:
    """Fields of `Router` that the flags set; `base` is a mixture of experts or None."""
    usual = Router() if base is None else base.router
    found = _score_changes(flags, usual, top_k)
    if flags.moe_router_topk_scaling_factor is not None:
        found["scale"] = flags.moe_router_topk_scaling_factor
    if flags.moe_router_enable_expert_bias:
        found["expert_bias"] = True
    factor = flags.moe_expert_capacity_factor
    if factor == 0:
        raise InputError(
            "--moe-expert-capacity-factor 0: experts would take in nothing; give more, or a negative number "
            "for all tokens"
        )
    if factor is not None:
        found["capacity_factor"] = max(factor, 0.0)
    if flags.moe_load_imbalance is not None:
        from planner.inputs.expert_loads import expert_loads  # Few jobs say it.

        early = flags.moe_load_imbalance == EARLY
        found["early"] = early
        found["loads"] = () if early else expert_loads(flags.moe_load_imbalance, "--moe-load-imbalance")
    return found | _groups(flags, base, top_k)


def _score_changes(flags: ExpertFlags, usual: Router, top_k: int) -> dict[str, Any]:
    given = flags.moe_router_score_function
    if given not in (None, "softmax", "sigmoid"):
        raise InputError(f"--moe-router-score-function {given}: expected softmax or sigmoid")
    score = given or usual.score
    found: dict[str, Any] = {} if given is None else {"score": score, "normalised": True}
    if flags.moe_router_pre_softmax:
        if score == "sigmoid":
            raise InputError(
                "--moe-router-pre-softmax needs --moe-router-score-function softmax, not sigmoid"
            )
        found["normalised"] = False
    if score == "softmax" and flags.moe_router_enable_expert_bias:
        raise InputError(
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, not softmax"
        )
    if given == "softmax" and usual.expert_bias:
        raise InputError(
            "--moe-router-score-function softmax: the model's experts have biases, which need sigmoid"
        )
    if top_k == 1 and (given is not None or flags.moe_router_topk is not None):
        if score == "softmax" and found.get("normalised", usual.normalised):
            raise InputError(
                "--moe-router-topk 1 needs --moe-router-pre-softmax: the weight of one expert would always "
                "be 1"
            )
        # Megatron-LM's weights of a single expert by sigmoid are not divided by their sum (moe_utils.py).
        found["normalised"] = False
    return found


def _groups(flags: ExpertFlags, base: ModelSpec | None, top_k: int) -> dict[str, Any]:
    """Group-limited routing: the score of a group is the sum of its `top_k / group_topk` best experts."""
    groups, chosen = flags.moe_router_num_groups, flags.moe_router_group_topk
    if groups is None and chosen is None:
        if base is None or base.router.groups == 1 or flags.moe_router_topk is None:
            return {}
        groups, chosen = base.router.groups, base.router.top_groups
        if base.router.group_score != _group_score(base.top_k, chosen):
            return {}  # Its groups are not ranked as Megatron-LM's.
    if groups is None or chosen is None:
        raise InputError("--moe-router-num-groups and --moe-router-group-topk go together; give both")
    if chosen > groups:
        raise InputError(f"--moe-router-group-topk {chosen}: expected 1 to {groups}, the number of groups")
    if chosen == groups:
        return {"groups": 1, "top_groups": 1, "group_score": "max"}
    score = _group_score(top_k, chosen)
    if score is None:
        raise InputError(
            f"--moe-router-group-topk {chosen}: groups are ranked by their best expert or their two best, "
            f"which --moe-router-topk {top_k} // group top-k must be"
        )
    return {"groups": groups, "top_groups": chosen, "group_score": score}


def _group_score(top_k: int, chosen: int) -> str | None:
    """Megatron-LM's score of a group of experts, as `Router.group_score`; None for any other score."""
    return {1: "max", 2: "top2"}.get(top_k // chosen)


def _leading_dense(text: str, layers: int) -> int:
    """Dense layers before those with experts; `text` is Megatron-LM's frequency or list of layers."""
    pattern = [1] * layers if text.strip() == "1" else list_of_layers(text)
    dense = pattern.index(1) if pattern and 1 in pattern else len(pattern or ())
    if pattern is None or 0 in pattern[dense:] or not set(pattern) <= {0, 1} or dense == len(pattern):
        raise InputError(
            f"--moe-layer-freq {text}: experts are in every layer but the first ones; give 1, or a list such "
            "as ([0]*3+[1]*58)"
        )
    if len(pattern) != layers:
        raise InputError(f"--moe-layer-freq {text}: lists {len(pattern)} layers, but the model has {layers}")
    return dense


def list_of_layers(text: str) -> list[int] | None:
    """The list that an expression of whole-number lists, + and * gives; None for anything else.

    A list of a YAML file arrives as numbers with blanks between them.
    """
    if re.fullmatch(r"\s*[0-9]{1,9}(\s+[0-9]{1,9})+\s*", text):
        return [int(word) for word in text.split()]
    try:
        result = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return result if isinstance(result, list) else None


def _evaluated(node: ast.expr) -> list[int] | int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluated(item) for item in node.elts]
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        times = isinstance(node.op, ast.Mult)
        if times and isinstance(left, list) and isinstance(right, int) and len(left) * right <= MOST_LAYERS:
            return left * right
    raise ValueError("not a list of layers")


def latent_changes(flags: LatentFlags, base: ModelSpec | None, heads: int) -> dict[str, Any]:
    """Fields of `ModelSpec` that the flags of latent attention set; `heads` are those of the model."""
    words = _given(LatentFlags, flags)
    usual = None if base is None else base.latent_attention
    if not words:
        return {}
    if not flags.multi_latent_attention and usual is None:
        raise InputError(f"{words[0]} needs --multi-latent-attention")
    start = usual or LatentAttention(
        q_lora_rank=0, kv_lora_rank=32, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    given = {
        "q_lora_rank": flags.q_lora_rank,
        "kv_lora_rank": flags.kv_lora_rank,
        "qk_nope_head_dim": flags.qk_head_dim,
        "qk_rope_head_dim": flags.qk_pos_emb_head_dim,
        "v_head_dim": flags.v_head_dim,
    }
    sizes = start.model_dump() | {name: value for name, value in given.items() if value is not None}
    return {
        "latent_attention": sizes,
        "head_dim": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"],
        "kv_heads": heads,
    }
