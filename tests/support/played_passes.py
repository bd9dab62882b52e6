"""Each pass of a rank with several stages: how high memory rises, as played and in the dry run.

The peak of a step is one moment of it. A pass that is played wrong shows here wherever the peak is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from torch.distributed.pipelining import PipelineStage

from costmodels.tapes import player, store
from costmodels.tapes.player import stage_program, step
from costmodels.tapes.player.heap import Heap
from costmodels.tapes.player.stage import Stage
from costmodels.tapes.player.stage_program import DOES, Program
from runtime.dryrun import run
from runtime.dryrun.tracker import Tracker
from tests.support.played_memory import Example, record

PASSES = ("forward", "backward", "inputs", "weights")

CHUNK_METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


class Pass(NamedTuple):
    """One pass of a stage."""

    stage: int
    high: float
    """Most bytes above those at its beginning."""


def played_passes(example: Example) -> list[Pass]:
    """The passes as they are played; their tapes are there.

    Raises:
        UnknownError: a unit cannot be recorded, or the step not be played.
    """
    model, layout, rank, compiled = example
    record(model, layout, compiled)
    found: list[Pass] = []
    numbers = layout.stages_of(rank)
    play = stage_program.play

    def listed(program: Program, stages: Sequence[Stage], states: Sequence[int], heap: Heap) -> list[int]:
        now = list(states)
        for chunk, does in zip(program.chunks.tolist(), program.does.tolist(), strict=True):
            effect, now[chunk] = stages[chunk].effect_of(DOES[does], now[chunk])
            if DOES[does] in PASSES:
                found.append(Pass(numbers[chunk], max([0, *(high for _, high, _ in effect.peaks)])))
        return play(program, stages, states, heap)

    with patch.object(step, "play", listed):
        player.rank_moments(model, layout, rank, compiled, store.installed_version())
    return found


def traced_passes(example: Example) -> list[Pass]:
    """The same passes of the dry run."""
    model, layout, rank, compiled = example
    trackers: list[Tracker] = []
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    """Stages, and ends in the log of changes, by methods and beginnings."""

    def tracker_of(*args: Any, **options: Any) -> Tracker:
        trackers.append(Tracker(*args, **options))
        return trackers[-1]

    with patch.object(run, "Tracker", tracker_of), _listed(trackers, spans):
        run.trace(model, layout, pipeline_rank=rank, compiled=compiled)
    (tracker,) = trackers
    _, allocated, _ = tracker._changes()
    found = []
    for (_, start), (stage, end) in spans.items():
        # The first stage leaves all of its backward to gradients of weights.
        if start >= tracker.first and end > start:
            found.append(Pass(stage, max(0, int(allocated[start:end].cumsum().max()))))
    return found


@contextmanager
def _listed(trackers: list[Tracker], spans: dict[tuple[str, int], tuple[int, int]]) -> Iterator[None]:
    def listing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run_pass(self: Any, *args: Any, **options: Any) -> Any:
            start = len(trackers[-1].numbers)
            result = method(self, *args, **options)
            spans[name, start] = self.stage_index, len(trackers[-1].numbers)
            return result

        return run_pass

    with ExitStack() as stack:
        for name in CHUNK_METHODS:
            # PyTorch's own: ours adds gradients up behind it.
            method = listing(name, getattr(PipelineStage, name))
            stack.enter_context(patch.object(PipelineStage, name, method))
        yield
