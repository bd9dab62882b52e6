"""Layers of stages for an engine that divides layers itself, given the reduction in the first and the last
stage. torchtitan divides layers in this way (`pipeline_parallel_layers_per_stage`,
`pipeline_parallel_first_stage_less_layers` and `pipeline_parallel_last_stage_less_layers`, release 0.3.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

MOST_CHUNKS = 2
"""Most chunks of a rank for which no layers per stage need to be given: one, or two under schedules of
several chunks."""

MOST_FEWER = 4
"""Most layers by which a search makes the first and the last stage smaller."""


def stage_layers(layers: int, stages: int, first_less: int, last_less: int) -> tuple[int, ...] | None:
    """Layers of each stage, as `_generate_llm_fqn_per_model_part` divides them; None where it refuses."""
    if stages == 1:
        return (layers,)
    each, more = divmod(layers + first_less + last_less, stages)
    if each < max(1, first_less, last_less):
        return None
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    return tuple(counts) if min(counts) > 0 else None


def less_layers(layers_per_stage: tuple[int, ...], chunks: int) -> tuple[int | None, int, int] | None:
    """The arguments that give these stages: layers per stage, and the difference of the first and the last
    stage.

    Args:
        chunks: model chunks of a rank; layers per stage are None where only the default gives that number of
            chunks.

    Returns:
        the arguments; None where no arguments give these stages.
    """
    layers, stages = sum(layers_per_stage), len(layers_per_stage)
    by_default: tuple[None, int, int] | None = None
    for first, last in _fewer(max(layers_per_stage)):
        if stage_layers(layers, stages, first, last) == layers_per_stage:
            each = -(-(layers + first + last) // stages)
            if -(-(layers + first + last) // each) == stages:
                return each, first, last
            if chunks <= MOST_CHUNKS and by_default is None:
                by_default = None, first, last
    return by_default


@cache
def shared_splits(layers: int, stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """All layers of stages that the engine's arguments can give, the most even first.

    Args:
        chunks: model chunks of a rank.
    """
    found: dict[tuple[int, ...], None] = {}
    for first, last in _fewer(MOST_FEWER):
        split = stage_layers(layers, stages, first, last)
        if split is not None and less_layers(split, chunks) is not None:
            found[split] = None
    return tuple(found)


def _fewer(most: int) -> Iterator[tuple[int, int]]:
    """Pairs of numbers by which the first and the last stage may be smaller, the smallest first."""
    yield from sorted(product(range(most + 1), range(most + 1)), key=sum)
