"""Rules that limit the search to the layouts that an engine runs (`costmodels.spec.abilities.Abilities`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from costmodels.errors import InputError
from costmodels.spec.abilities import ZERO_STAGES
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Precision
from costmodels.spec.layout import GATHERS_FP8, fp8_conflict
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import ALL_TO_ALL, BLOCK, RING, Bools, Ints, LayoutTable, code_of, value_of
from planner.inputs.choice import Choice
from planner.inputs.pins import Pins, WherePossible
from planner.space.kind_rules import has_windows, kind_rules
from planner.space.rule import Rule
from planner.space.shared_stages import shared_splits

SWITCHES = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "expert_tensor_parallel")
"""Degrees that must be 1 for an engine without the feature."""

COMMAND = "`planner engines --json`"
"""Command that shows the abilities of engines."""

MESH_DEGREES = (*SWITCHES, "context_parallel", "context_parallel_form", "schedule")

GROUP_OF = {
    "sequence_parallel": "tensor_parallel",
    "context_parallel_form": "context_parallel",
}
"""For a pin that holds "where possible": the degree that must exceed 1 for it to apply."""


def limits(engine: Engine) -> dict[str, tuple[Any, ...]]:
    """The values that an engine runs, for each degree with values that it does not run."""
    runs = engine.runs
    found: dict[str, tuple[Any, ...]] = {name: (1,) for name in SWITCHES if not getattr(runs, name)}
    if not runs.sequence_parallel:
        found["sequence_parallel"] = (False,)
    if not runs.context_parallel_forms:
        found["context_parallel"] = (1,)
    found |= {
        f"offload_{what}": (False,) for what in ("activations", "optimizer") if what not in runs.offload
    }
    for name, field in (
        ("schedule", "schedules"),
        ("context_parallel_form", "context_parallel_forms"),
        ("zero_stage", "zero_stages"),
        ("recompute", "recompute"),
    ):
        own = getattr(runs, field)
        if own and set(own) < set(type(runs).model_fields[field].default):
            found[name] = own
    return found


def check_pins(engine: Engine, pins: Pins) -> None:
    """Raise `InputError` where pins leave a degree no value that the engine runs."""
    runs = limits(engine)
    for name, values in runs.items():
        pin = pins.get(name)
        if isinstance(pin, WherePossible):
            # It holds in groups of two ranks at least, which this engine need not have at all.
            wanted = pin.value in values or runs.get(GROUP_OF.get(name, "")) == (1,)
        elif isinstance(pin, Choice):
            wanted = any(value in pin for value in values)
        else:
            wanted = pin is None or pin in values
        if not wanted:
            raise InputError(f"pin {name}={pin}: {_has(engine, name, values)}")


def check_formats(engine: Engine, precision: Precision, pins: Pins) -> None:
    """Raise `InputError` where pins ask for an fp8 feature that the precision or the engine does not have."""
    recipe, gathers = str(pins.get("fp8_recipe", "default")), pins.get("fp8_param_gather") is True
    conflict = fp8_conflict(precision, recipe, gathers)
    if conflict is not None:
        raise InputError(f"pin {conflict}")
    able = engine.runs.fp8_recipes
    if recipe not in ("default", *able):
        others = ", ".join(able) or "no recipe to choose"
        raise InputError(f"pin fp8_recipe={recipe}: engine {engine.name} has {others} ({COMMAND})")
    mode, modes = str(pins.get("muon_mode", "default")), engine.runs.muon_modes
    if mode != "default" and pins.get("optimizer") != "muon":
        raise InputError(f"pin muon_mode={mode}: needs optimizer muon; also pin optimizer=muon")
    if mode not in ("default", *modes):
        raise InputError(f"pin muon_mode={mode}: engine {engine.name} has {', '.join(modes)} ({COMMAND})")
    for name in ("fp8_param_gather", "expert_halves", "cuda_graphs"):
        if pins.get(name) is True and not getattr(engine.runs, name):
            raise InputError(
                f"pin {name}: engine {engine.name} is priced without it; leave it out ({COMMAND})"
            )
    usual = next(iter(able), "default") if recipe == "default" else recipe
    if gathers and usual not in GATHERS_FP8:
        raise InputError(f"pin fp8_param_gather needs fp8_recipe {' or '.join(GATHERS_FP8)}, not {usual}")


def engine_rules(engine: Engine, precision: str) -> tuple[Rule, ...]:
    """The rules of an engine in a precision; none for one that runs everything."""
    return tuple(_rules(engine, precision))


def _rules(engine: Engine, precision: str) -> Iterator[Rule]:
    """All rules of an engine; a layout is counted under the first rule that it breaks."""
    if engine.runs.splits_plain_layers:
        yield from kind_rules(precision)
    for subject in SUBJECTS:
        yield from subject(engine)


def _degree_rules(engine: Engine) -> Iterator[Rule]:
    """Rules against values of single degrees that an engine does not run."""
    limited = limits(engine)
    for name in sorted(limited, key=lambda name: name not in MESH_DEGREES):
        where = _in_context if name == "context_parallel_form" else None
        yield _only(engine, name, limited[name], where)


def _zero_rules(engine: Engine) -> Iterator[Rule]:
    """Rules for stages of ZeRO with pipelines, context parallelism and experts, and without a pipeline."""
    runs = engine.runs
    for rule, stages, degree in (
        ("engine_zero_pipeline", runs.pipeline_zero_stages, "pipeline_parallel"),
        ("engine_zero_context", runs.context_zero_stages, "context_parallel"),
        ("engine_zero_experts", runs.expert_zero_stages, "expert_parallel"),
    ):
        if set(stages) < set(runs.zero_stages):
            yield _only(engine, "zero_stage", stages, _above_one(degree), f" with {degree}", rule)
    if set(runs.unpiped_zero_stages) < set(runs.zero_stages):
        yield _only(
            engine,
            "zero_stage",
            runs.unpiped_zero_stages,
            lambda d: d.pipeline_parallel == 1,
            " without pipeline_parallel",
            "engine_zero_alone",
        )


def _expert_rules(engine: Engine) -> Iterator[Rule]:
    """Rules for the split of experts and of key/value heads, and for degrees combined with it."""
    runs = engine.runs
    if runs.pipeline_parallel and not runs.pipelines_of_experts:
        yield Rule(
            "engine_pipeline_experts",
            lambda model, d: (d.pipeline_parallel > 1) & (model.experts > 0),
            lambda model, d: f"engine {engine.name} has no pipelines of models with experts ({COMMAND})",
            of_mesh=True,
        )
    if runs.experts_need_sequence_parallel:
        yield Rule(
            "engine_experts_sequence",
            lambda model, d: (d.tensor_parallel > 1) & ~d.sequence_parallel & (model.experts > 0),
            lambda model, d: (
                f"engine {engine.name} needs sequence_parallel where a model with experts has "
                f"tensor_parallel {d.tensor_parallel} ({COMMAND})"
            ),
        )
    if runs.whole_kv_heads:
        yield Rule(
            "engine_kv_heads",
            lambda model, d: d.tensor_parallel > model.kv_heads,
            lambda model, d: (
                f"engine {engine.name} gives each rank key/value heads of its own: tensor_parallel "
                f"{d.tensor_parallel} exceeds {model.kv_heads} ({COMMAND})"
            ),
            of_mesh=True,
        )
    if runs.exchanges_whole_kv_heads:
        yield Rule(
            "engine_context_kv_heads",
            lambda model, d: (
                (d.context_parallel_form == ALL_TO_ALL)
                & (_kv_heads_of_rank(model, d) % d.context_parallel != 0)
            ),
            lambda model, d: (
                f"engine {engine.name} gives each rank of context_parallel_form all_to_all key/value heads "
                f"of its own: context_parallel {d.context_parallel} does not divide the "
                f"{_kv_heads_of_rank(model, d)} of a tensor-parallel rank; use all_gather or ring ({COMMAND})"
            ),
            of_mesh=True,
        )
    if runs.expert_split != "any":
        yield _expert_split(engine)
    if runs.experts_over_data_parallel:
        yield Rule(
            "engine_experts_data",
            lambda model, d: (model.experts > 0) & (d.data_parallel % d.expert_parallel != 0),
            lambda model, d: (
                f"engine {engine.name} spreads experts over data-parallel ranks alone: expert_parallel "
                f"{d.expert_parallel} does not divide data_parallel {d.data_parallel} ({COMMAND})"
            ),
            of_mesh=True,
        )


def _attention_rules(engine: Engine) -> Iterator[Rule]:
    """Rules for kinds of attention with forms of context parallelism; `kind_rules` has those of the
    runtime."""
    runs = engine.runs
    if not runs.windows_in_ring:
        yield Rule(
            "engine_ring_window",
            lambda model, d: _in_context(d) & (d.context_parallel_form == RING) & has_windows(model),
            lambda model, d: (
                f"engine {engine.name} has no windows in context_parallel_form ring, and layers of "
                f"{model.name} see {model.window} of {model.seq} tokens; use all_gather or "
                f"all_to_all ({COMMAND})"
            ),
            of_mesh=True,
        )
    if set(runs.sink_forms) < set(runs.context_parallel_forms):
        forms = [code_of("context_parallel_form", form) for form in runs.sink_forms]
        yield Rule(
            "engine_context_sinks",
            lambda model, d: (
                _in_context(d) & ~np.isin(d.context_parallel_form, forms) & model.attention_sinks
            ),
            lambda model, d: (
                f"engine {engine.name} has attention sinks, as {model.name} has them, with "
                f"context_parallel_form {', '.join(runs.sink_forms)} alone ({COMMAND})"
            ),
            of_mesh=True,
        )


def _kv_heads_of_rank(model: ModelSpec, d: LayoutTable) -> Ints:
    """Key/value heads of a tensor-parallel rank before ranks exchange them, [n]."""
    heads = model.heads if model.latent_attention is not None else model.kv_heads
    return np.maximum(heads // d.tensor_parallel, 1)


def _schedule_rules(engine: Engine) -> Iterator[Rule]:
    """Rules for schedules with other parts of a layout, and for the division of layers."""
    runs = engine.runs
    if runs.untied_schedules:
        tied = [code_of("schedule", name) for name in runs.untied_schedules]
        yield Rule(
            "engine_schedule_tied",
            lambda model, d: np.isin(d.schedule, tied) & model.tied,
            lambda model, d: (
                f"engine {engine.name} runs schedule {', '.join(runs.untied_schedules)} where the output "
                f"head has a weight of its own, and {model.name} shares the embedding's ({COMMAND})"
            ),
            of_mesh=True,
        )
    for rule, schedules, where, when in (
        ("engine_schedule_context", runs.context_parallel_schedules, _in_context, " with context_parallel"),
        (
            "engine_schedule_uneven",
            runs.uneven_schedules,
            lambda d: d.deepest * d.stages != d.layers,
            " with stages of unequal layers",
        ),
        (
            "engine_schedule_offload",
            runs.offload_activations_schedules,
            lambda d: d.offload_activations,
            " with offload_activations",
        ),
    ):
        if set(schedules) < set(runs.schedules):
            yield _only(engine, "schedule", schedules, where, when, rule)
    if runs.stages_alike:
        yield Rule(
            "engine_stages",
            _not_shared_out,
            lambda model, d: (
                f"no option of engine {engine.name} shares {d.layers} layers out among {d.stages} stages "
                f"of {d.virtual_pipeline_parallel} chunks a rank; a list of stages does ({COMMAND})"
            ),
            redundant=True,
            of_mesh=True,
            lifted_by=(("layers_per_stage",),),
        )


def _zero_state_rules(engine: Engine) -> Iterator[Rule]:
    """Rules for stages of ZeRO with copies of shards and with an offloaded optimizer."""
    runs = engine.runs
    if set(runs.hybrid_zero_stages) < {1, 2, 3}:
        yield _only(
            engine,
            "zero_stage",
            runs.hybrid_zero_stages,
            lambda d: d.zero_replicas > 1,
            " with zero_replicas",
            "engine_zero_replicas",
        )
    if "optimizer" in runs.offload and set(runs.offload_optimizer_zero_stages) < set(ZERO_STAGES):
        yield _only(
            engine,
            "zero_stage",
            runs.offload_optimizer_zero_stages,
            lambda d: d.offload_optimizer,
            " with offload_optimizer",
            "engine_zero_offload",
        )


def _recompute_rules(engine: Engine) -> Iterator[Rule]:
    """Rules for the modules and layers that an engine recomputes."""
    runs = engine.runs
    if runs.modules_of(0) != type(runs).model_fields["recompute_modules"].default:
        yield Rule(
            "engine_recompute_modules",
            lambda model, d: (
                (d.recompute_modules & ~code_of("recompute_modules", runs.modules_of(model.experts))) != 0
            ),
            lambda model, d: _has(
                engine,
                "recompute_modules",
                runs.modules_of(model.experts),
                given="+".join(value_of("recompute_modules", int(d.recompute_modules))),
            ),
        )
    if set(runs.recompute_some_layers) < {"selective", "full"}:
        yield _only(
            engine,
            "recompute",
            runs.recompute_some_layers,
            lambda d: d.recompute_method == BLOCK,
            " of some layers alone (recompute_method block)",
            "engine_recompute_layers",
        )


SUBJECTS: tuple[Callable[[Engine], Iterator[Rule]], ...] = (
    _degree_rules,
    _zero_rules,
    _expert_rules,
    _attention_rules,
    _schedule_rules,
    _zero_state_rules,
    _recompute_rules,
)
"""Rules by subject, in the order of their use."""


def _expert_split(engine: Engine) -> Rule:
    always = engine.runs.expert_split == "as_layers"

    def wanted(d: LayoutTable) -> Ints:
        """The expert tensor parallelism that the engine needs there."""
        return np.where(always | (d.expert_parallel == 1), d.tensor_parallel, 1)

    return Rule(
        "engine_expert_split",
        lambda model, d: (model.experts > 0) & (d.expert_tensor_parallel != wanted(d)),
        lambda model, d: (
            f"engine {engine.name} has expert_tensor_parallel {wanted(d)} with tensor_parallel "
            f"{d.tensor_parallel} and expert_parallel {d.expert_parallel}, not {d.expert_tensor_parallel} "
            f"({COMMAND})"
        ),
        of_mesh=True,
    )


def _only(
    engine: Engine,
    name: str,
    values: Sequence[Any],
    where: Callable[[LayoutTable], Bools] | None = None,
    when: str = "",
    rule: str = "",
) -> Rule:
    """A rule that degree `name` has one of `values`, applied `where` the mask holds."""
    codes = [code_of(name, value) for value in values]

    def broken(_: object, d: LayoutTable) -> Bools:
        other: Bools = ~np.isin(getattr(d, name), codes)
        return other if where is None else other & where(d)

    def message(_: object, d: LayoutTable) -> str:
        return _has(engine, name, values, when, value_of(name, int(getattr(d, name))))

    return Rule(rule or f"engine_{name}", broken, message, of_mesh=name in MESH_DEGREES)


def _has(engine: Engine, name: str, values: Sequence[Any], when: str = "", given: object = None) -> str:
    """The values of a degree that an engine runs, in words."""
    if name.startswith("offload_"):
        what = f"offloads no {name.removeprefix('offload_')}"
    elif tuple(values) in ((1,), (False,)):
        what = f"has no {name.replace('_parallel', ' parallelism').replace('_', ' ')}{when}"
    elif not values:
        what = f"has no {name}{when}"
    else:
        what = f"runs {name} {', '.join(map(str, values))}{when}"
        if given is not None:
            what += f", not {given}"
    return f"engine {engine.name} {what} ({COMMAND})"


def _not_shared_out(_: ModelSpec, d: LayoutTable) -> Bools:
    layers, stages, chunks = np.broadcast_arrays(d.layers, d.stages, d.virtual_pipeline_parallel)
    every, place = np.unique(np.stack([layers, stages, chunks]).reshape(3, -1), axis=1, return_inverse=True)
    # More stages than layers are no matter of options.
    found = [each[1] <= each[0] and not shared_splits(*each) for each in every.T.tolist()]
    broken = np.array(found, dtype=np.bool_)
    return broken[place].reshape(stages.shape)


def _in_context(d: LayoutTable) -> Bools:
    found: Bools = d.context_parallel > 1
    return found


def _above_one(name: str) -> Callable[[LayoutTable], Bools]:
    def above(d: LayoutTable) -> Bools:
        found: Bools = getattr(d, name) > 1
        return found

    return above
