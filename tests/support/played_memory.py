"""Played tapes against dry runs of the runtime: random models and layouts, and how far the two are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

from costmodels import LatentAttention, Layout, ModelSpec, even_split
from costmodels.spec.layout import SPLIT_BACKWARD, Schedule
from costmodels.spec.model_parts import MultiTokenPrediction
from costmodels.spec.table import LayoutTable
from costmodels.tapes import player, store
from costmodels.tapes.player import CATEGORIES
from planner.space.kind_rules import kind_rules
from planner.space.rules import first_violation
from runtime.dryrun.recording import UnlikeError
from runtime.dryrun.run import trace
from runtime.dryrun.symbols import UnknownSizeError
from runtime.dryrun.tape_recorder import recorded_tape

SHARE, BYTES = 0.001, 2**20
"""How far what is played may be from the dry run: the larger of a share and of a number of bytes."""

OPTIMIZERS = ["adam", "adam", "adam", "sgd", "adafactor", "muon"]

MORE_OPTIMIZERS = ["adam8bit"] if find_spec("torchao") else []
"""Those that examples of any size have besides."""

FP8 = ["fp8"] if find_spec("torchao") else []

SCHEDULES: tuple[Schedule, ...] = ("interleaved", "interleaved_zb", "zbv", "dualpipev")
"""Of several stages on a rank; the last two have two of them."""

Chosen = TypeVar("Chosen")
Choose = Callable[[Sequence[Any]], Any]
"""Takes one of several values."""

MODULES: tuple[tuple[str, ...], ...] = (
    ("core_attention",),
    ("mlp",),
    ("norm",),
    ("norm", "activation"),
    ("core_attention", "mlp", "norm"),
)


class Example(NamedTuple):
    """What is compared."""

    model: ModelSpec
    layout: Layout
    rank: int
    """Of the pipeline."""
    compiled: bool
    """Its layers are compiled."""

    def describe(self) -> str:
        """In one line."""
        layers = "compiled" if self.compiled else "eager"
        layout = f"{self.layout.describe()} {self.layout.precision}"
        return f"rank {self.rank} of {layout}, {layers}: {self.model!r}"


@dataclass(frozen=True)
class Errors:
    """What is played less the dry run, in bytes, of one pipeline rank."""

    peak: float
    by_kind: dict[str, float]
    traced: dict[str, float]
    """Bytes of the dry run, by kind and as `peak`."""

    @property
    def misses(self) -> list[str]:
        """What is too far off."""
        every = {"peak": self.peak, **self.by_kind}
        return [name for name, error in every.items() if abs(error) > allowed(self.traced[name])]


def allowed(size: float) -> float:
    """How many bytes may be off."""
    return max(BYTES, SHARE * size)


KINDS = ("plain", "window", "sinks", "linear", "capped", "further")
"""What models have: attention of all tokens, windows, these with sinks, Gated DeltaNet, scores with caps, or
modules that predict further tokens. Of some, sequences are no whole numbers of steps, or few of them."""


def draw_kind(choose: Choose, kind: str) -> dict[str, Any]:
    """Random fields of models of a kind."""
    if kind == "plain":
        return {}
    if kind == "further":
        return {"mtp": MultiTokenPrediction(depths=choose([1, 2]))}
    if kind == "linear":
        keys = choose([4, 8])
        sizes = {
            "kind": "gated_delta",
            "key_heads": keys,
            "value_heads": keys * choose([1, 2]),
            "key_dim": choose([64, 96]),
            "value_dim": choose([64, 128]),
            "chunk": choose([64, 64, 80]),
        }
        pattern = choose([("linear",), ("linear", "full"), ("linear", "linear", "full")])
        gate, norm = choose([False, True]), choose([False, True])
        own = {"attention_gate": gate, "norm_from_one": norm, "seq": choose([1024, 2048, 4096, 2000, 192])}
        return {"linear_attention": sizes, "attention_pattern": pattern} | own
    pattern = choose([("window",), ("window", "full"), ("full", "window", "window")])
    found = {"window": choose([256, 512, 1000]), "attention_pattern": pattern}
    if kind == "capped":
        own = {"attention_softcap": 50.0, "logits_softcap": choose([0.0, 30.0])}
        return found | own | {"seq": choose([1024, 2048, 4096, 2000, 3120])}
    return found | {"attention_sinks": kind == "sinks"}


def draw_model(choose: Choose, small: bool, kind: str | None = None) -> ModelSpec:
    """A random model, wide enough for errors to show; of few layers where it is to be small.

    Args:
        kind: one of `KINDS`; drawn where not given.

    Raises:
        ValueError: its fields contradict each other.
    """
    heads, head_dim = choose([8, 16]), choose([64, 128, 128, 80])
    kind = choose(["plain", *KINDS]) if kind is None else kind
    gated = choose([False, True])
    latent = kind in ("plain", "further", "linear") and choose([False, False, True])
    if latent:
        extra: dict[str, Any] = {"latent_attention": draw_latent(choose), "kv_heads": heads}
    else:
        extra = {"kv_heads": choose([heads, heads, 4, 2])}
    fields: dict[str, Any] = {
        "name": "drawn",
        "layers": choose([1, 2, 3] if small else [1, 2, 3, 4, 6, 8]),
        "hidden": choose([1024, 2048, 4096]),
        "heads": heads,
        "head_dim": head_dim,
        "ffn": choose([2048, 2816, 8192]),
        "vocab": choose([8000, 32000, 50257]),
        "seq": choose([1024, 2048, 4096]),
        "gated": gated,
        "activation": "silu" if gated else choose(["gelu", "gelu_tanh", "relu2"]),
        "norm": choose(["layernorm", "rmsnorm"]),
        "position": choose(["learned", "rope", "none"]),
        "tied": choose([False, True]),
        "linear_bias": choose([False, True]),
        "qkv_bias": choose([False, True]),
        "qk_norm": choose([False, True]) and not latent,
        **extra,
        **(draw_experts(choose) if choose([False, False, True]) else {}),
    }
    return ModelSpec(**(fields | draw_kind(choose, kind)))


def draw_experts(choose: Choose) -> dict[str, Any]:
    """Random experts."""
    shared, groups = choose([0, 0, 1024]), choose([1, 1, 2, 4])
    return {
        "experts": choose([4, 8, 16]),
        "top_k": choose([1, 2, 4]),
        "expert_ffn": choose([512, 1024, 2048]),
        "dense_layers": choose([0, 0, 1]),
        "shared_expert_ffn": shared,
        "shared_expert_gate": bool(shared) and choose([False, True]),
        "router": {
            "score": choose(["softmax", "sigmoid"]),
            "scale": choose([1.0, 1.0, 2.5]),
            "normalised": choose([False, True]),
            "groups": groups,
            "top_groups": choose([1, 2]) if groups > 1 else 1,
            "group_score": choose(["max", "top2"]) if groups > 1 else "max",
            "expert_bias": choose([False, True]),
            "capacity_factor": choose([0.0, 0.0, 0.0, 0.5, 1.0, 1.5]),
        },
    }


def draw_latent(choose: Choose) -> LatentAttention:
    """Random sizes of latent attention."""
    return LatentAttention(
        q_lora_rank=choose([0, 768]),
        kv_lora_rank=choose([256, 512]),
        qk_nope_head_dim=choose([64, 128]),
        qk_rope_head_dim=choose([32, 64]),
        v_head_dim=choose([64, 128]),
    )


def draw_layout(choose: Choose, model: ModelSpec, small: bool) -> Layout:
    """A random layout of up to 64 ranks, legal or not.

    Raises:
        ValueError: its fields contradict each other.
    """
    tp, dp, cp = choose([1, 1, 2, 4]), choose([1, 2, 4, 8]), choose([1, 1, 1, 2])
    pipeline = min(choose([1, 1, 2, 3, 4]), model.layers)
    zero: Any = choose([0, 1, 2, 3]) if dp * cp > 1 else 0
    size, more = choose([1, 1, 2]), choose([0, 1, 2] if small else [0, 1, 2, 4])
    recompute = choose(["none", "none", "full", "selective"])
    chunks = choose([1, 1, 2, 3, 4]) if 1 < pipeline <= model.layers // 2 else 1
    chunks = min(chunks, model.layers // pipeline)
    schedule: Any = choose(SCHEDULES[: 4 if chunks == 2 else 2]) if chunks > 1 else "1f1b"
    fewest = 2 * pipeline if schedule == "dualpipev" else max(1, pipeline)
    split = list(even_split(model.layers, pipeline * chunks))
    if pipeline > 1 and split[-1] > 1 and choose([False, True]):
        split[0], split[-1] = split[0] + 1, split[-1] - 1
    return Layout(
        tensor_parallel=tp,
        sequence_parallel=tp > 1 and choose([False, True]),
        pipeline_parallel=pipeline,
        virtual_pipeline_parallel=chunks,
        schedule=schedule,
        layers_per_stage=tuple(split),
        context_parallel=cp,
        context_parallel_form=choose(["all_gather", "all_to_all", "ring"]) if cp > 1 else "all_gather",
        expert_parallel=choose([1, 2, 4]) if model.experts else 1,
        expert_tensor_parallel=choose([1, 1, 2]) if model.experts else 1,
        data_parallel=dp,
        zero_stage=zero,
        zero_replicas=choose([1, 1, 2, 4]) if zero else 1,
        micro_batch_size=size,
        global_batch_size=size * dp * (fewest + more),
        recompute=recompute,
        recompute_modules=choose(MODULES) if recompute == "selective" else (),
        recompute_method=choose(["uniform", "uniform", "block"]) if recompute != "none" else "uniform",
        recompute_num_layers=choose([1, 1, 2, 3]) if recompute == "full" else 1,
        offload_activations=choose([False, False, False, True]),
        precision=choose(["bf16", "bf16", "fp16", "fp32", *FP8]),
        gradient_reduction=choose(["fp32", "fp32", "bf16"]),
        optimizer=choose([*OPTIMIZERS, *MORE_OPTIMIZERS * (not small)]),
        offload_optimizer=choose([False, False, False, True]),
    )


def draw(
    choose: Choose,
    small: bool = False,
    compiled: bool | None = None,
    kind: str | None = None,
    is_wanted: Callable[[ModelSpec, Layout], bool] = lambda *_: True,
) -> Example | None:
    """A random example; None for what the runtime does not run, or is not wanted.

    Args:
        small: few layers and micro batches.
        compiled: layers are; drawn where not given.
        kind: of the model, one of `KINDS`; drawn where not given.
    """
    compiled = choose([False, True]) if compiled is None else compiled
    try:
        model = draw_model(choose, small, kind)
        layout = draw_layout(choose, model, small)
    except ValueError:
        return None
    if layout.world_size > 64 or not is_wanted(model, layout) or first_violation(model, layout) is not None:
        return None
    if any(bool(rule.broken(model, LayoutTable.one(layout))) for rule in kind_rules(layout.precision)):
        return None
    if compiled and layout.schedule in SPLIT_BACKWARD:
        return None
    return Example(model, layout, choose(range(layout.pipeline_parallel)), compiled)


class UnknownError(RuntimeError):
    """A unit cannot be recorded, or a step not be played."""


def record(model: ModelSpec, layout: Layout, compiled: bool) -> None:
    """Record the units of a layout that have no tape yet.

    Raises:
        UnknownError: one cannot be recorded, or the step not be played.
    """
    version = store.installed_version()
    if not player.is_playable(model, layout, compiled, version):
        raise UnknownError(f"{layout.describe()} is not played")
    splits = layout.schedule in SPLIT_BACKWARD
    for structure in player.missing(model, layout, compiled, version):
        try:
            store.remember_tapes({structure: recorded_tape(structure, splits)}, version)
        except (UnlikeError, UnknownSizeError, ValueError) as error:
            raise UnknownError(f"{structure.name}: {error}") from error
    if not player.plays(model, layout, compiled, version):
        raise UnknownError(f"{layout.describe()}: its layers are not played together")


def compare(model: ModelSpec, layout: Layout, rank: int, compiled: bool = False) -> Errors:
    """What is played against a dry run of one pipeline rank.

    Categories are compared at the moments that are as high as the peak: where there are several, those count
    that are most alike.

    Raises:
        UnknownError: a unit cannot be recorded, or the step not be played.
    """
    record(model, layout, compiled)
    moments = player.rank_moments(model, layout, rank, compiled, store.installed_version())
    highest = max(moments, key=lambda moment: moment.total)
    own = dict(zip(CATEGORIES, highest.composition, strict=True))
    found = trace(model, layout, pipeline_rank=rank, compiled=compiled)
    peak, errors = float(found.peak.total), []
    for moment in found.ties:
        traced = {"peak": peak, **{kind: float(moment.allocated[kind]) for kind in CATEGORIES}}
        errors.append(
            Errors(highest.total - peak, {kind: own[kind] - traced[kind] for kind in CATEGORIES}, traced)
        )
    return min(errors, key=lambda one: max(abs(e) / allowed(one.traced[k]) for k, e in one.by_kind.items()))
