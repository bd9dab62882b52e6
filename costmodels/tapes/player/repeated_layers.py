"""Compiled layers of which backward computes several again at once (`recomputation._run_units`).

The compiler takes the recomputation of one layer into its graphs, but not that of several. There each layer
does all that it does without recomputation; what it saves ends with its forward pass, and is there again once
the first layer's input has gone through all of them a second time.
"""

from __future__ import annotations

from functools import lru_cache

from costmodels.tapes.tape import (
    INPUT,
    OUTPUT_GRADIENT,
    Allocation,
    Event,
    Gradient,
    Release,
    Tape,
)

INPUT_CATEGORY = "activations"
"""Of the input that stays while the layers do not."""


@lru_cache(maxsize=256)
def repeated(plain: Tape) -> Tape:
    """The tape of the last of such layers: it keeps its input only, and backward begins with forward again.

    Args:
        plain: of the layer without recomputation.
    """
    made = [event.storage for event in plain.forward if isinstance(event, Allocation)]
    ended = {event.storage for event in plain.forward if isinstance(event, Release)}
    saved = [storage for storage in made if storage not in ended]
    forward = [event for event in plain.forward if event != Release(INPUT)]
    forward += map(Release, saved)
    last = 1 + max((*made, *_storages(plain.backward), OUTPUT_GRADIENT))
    renamed = {storage: last + place for place, storage in enumerate(made)}
    again = [_renamed(event, renamed) for event in plain.forward if event != Release(INPUT)]
    backward = [_renamed(event, renamed) for event in plain.backward]
    return plain._replace(
        forward=tuple(forward),
        backward=(*again, *_with_late_input(tuple(backward))),
        input_category=INPUT_CATEGORY,
    )


@lru_cache(maxsize=256)
def holding_input(plain: Tape) -> Tape:
    """The tape of the first of such layers when it is there again: its input stays as long as its graph."""
    return plain._replace(
        forward=tuple(event for event in plain.forward if event != Release(INPUT)),
        backward=_with_late_input(plain.backward),
        input_category=INPUT_CATEGORY,
    )


def _with_late_input(backward: tuple[Event, ...]) -> tuple[Event, ...]:
    """Backward in which the input ends when the layer's graph has run, before gradients come."""
    others = [event for event in backward if event != Release(INPUT)]
    places = [place for place, event in enumerate(others) if isinstance(event, Gradient)]
    end = places[0] if places else len(others)
    return (*others[:end], Release(INPUT), *others[end:])


def _storages(events: tuple[Event, ...]) -> list[int]:
    return [event.storage for event in events if isinstance(event, Allocation)]


def _renamed(event: Event, names: dict[int, int]) -> Event:
    """An event of the second time, whose storages are others than those of the first."""
    if isinstance(event, Allocation | Release | Gradient) and event.storage in names:
        return event._replace(storage=names[event.storage])
    return event
