"""Layers of stages that an engine shares out itself, told how many fewer the first and the last stage have.

torchtitan shares out layers in this way (`pipeline_parallel_layers_per_stage`,
`pipeline_parallel_first_stage_less_layers` and `pipeline_parallel_last_stage_less_layers`, release 0.3.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

MOST_CHUNKS = 2
"""Chunks of a rank that need no number of layers per stage: one, or two under schedules of several."""

MOST_FEWER = 4
"""Layers that the first and the last stage have fewer, at most, where a search chooses."""


def stage_layers(layers: int, stages: int, first_less: int, last_less: int) -> tuple[int, ...] | None:
    """Layers of each stage, as `_generate_llm_fqn_per_model_part` shares them out; None where it refuses."""
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
    """The arguments that give these stages: layers per stage, and how many fewer the first and the last stage
    have.

    Args:
        chunks: model chunks of a rank; layers per stage are None where only the default makes so many.

    Returns:
        None where nothing gives these stages.
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
    """Layers of stages that the engine can be told to have, the most even first.

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
    """Layers that the first and the last stage have less, the fewest first."""
    yield from sorted(product(range(most + 1), range(most + 1)), key=sum)
