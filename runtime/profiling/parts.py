"""Seconds of a step by part, from the events of a profiler. Never imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from planner.history.step_parts import TERMS, StepParts

NS = 1e-9

SHORTEST_WAIT_NS = 200_000
"""Nanoseconds without an operation from which on a CPU rank counts as waiting, if a message is in progress.
Python between two operators takes a tenth of that."""

OPTIMIZER_RANGE = "planner: optimizer"
"""Name of the range of the optimizer step."""

STEP_RANGE = "planner: step"
"""Name of the range of a training step."""


class Event(NamedTuple):
    """An event: an operator on the host, a kernel on a device, or a named range of either."""

    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    """The host thread of the event; for an event of the device, its queue."""
    on_device: bool = False
    is_range: bool = False
    """True for a named range."""
    overlaps: bool = False
    """True if the event may begin in one operation and end in another, as messages do."""
    number: int = 0
    """The operator's number, to which `launched_by` of kernels refers."""
    launched_by: int = 0


_KINDS = (
    ("all_reduce", r"all_?reduce"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all"),
    ("broadcast", r"broadcast"),
    ("send_receive", r"send|recv|receive"),
    ("barrier", r"barrier"),
)
_COLLECTIVE = re.compile(r"^(?:c10d::|_c10d_functional::|gloo:|nccl|hccl|rccl|mccl)", re.IGNORECASE)
_ATTENTION = re.compile(r"scaled_?dot_?product|flash|fmha|flex_attention|sdpa|attn", re.IGNORECASE)
_PRODUCT = re.compile(
    r"^aten::(?:mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|_scaled_grouped_mm|mv|addmv|dot|mkldnn_linear"
    r"|_addmm_activation|_weight_int8pack_mm|mkldnn_linear_backward.*)$"
    r"|gemm|cutlass|nvjet|cublas|xmma|wgmma|triton_tem|Cijk_",
    re.IGNORECASE,
)
_OPERATOR = re.compile(r"^(?:aten|mkldnn|quantized|torchao|fsdp|prims|triton)\w*::")


def collective_kind(name: str) -> str | None:
    """The kind of collective of an operator or kernel with this name; None for others."""
    if not _COLLECTIVE.match(name) or name.endswith("::wait_tensor"):
        # Only the message itself says which message a `wait_tensor` waits for.
        return None
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def _work_kind(name: str) -> str:
    if _ATTENTION.search(name):
        return "attention"
    return "products" if _PRODUCT.search(name) else "elementwise"


def step_parts(events: Sequence[Event]) -> StepParts | None:
    """The mean of the steps in `events`; None without steps.

    Without device kernels, host operators are used. The seconds of an operator, without the operators that it
    calls, belong to its kind. Seconds without an operator are Python; if they are long and a message is in
    progress, they are waiting. On a device, a kernel's kind follows from its name; kernels of collectives
    count only while no other kernel runs.
    """
    steps = [event for event in events if event.name == STEP_RANGE and not event.on_device]
    if not steps:
        return None
    seconds: dict[str, float] = {}
    for step in steps:
        inside = [
            e for e in events if e.end_ns > step.start_ns and e.start_ns < step.end_ns and e is not step
        ]
        found = _on_device(step, inside) if any(e.on_device for e in inside) else _on_host(step, inside)
        for kind, amount in found:
            seconds[kind] = seconds.get(kind, 0.0) + amount * NS / len(steps)
    own = [name for name in TERMS if name != "communication"]
    return StepParts(
        **{name: seconds.pop(name, 0.0) for name in own},
        collectives=dict(sorted(seconds.items())),
    )


def _on_device(step: Event, events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Nanoseconds of each kind of work on a device during a step."""
    launched = _numbers_in_ranges(events)
    work: list[tuple[str, Event]] = []
    messages: list[tuple[str, Event]] = []
    for event in events:
        if not event.on_device or event.is_range:
            continue
        kind = collective_kind(event.name)
        if kind is not None:
            messages.append((kind, event))
        else:
            updates = event.launched_by in launched
            work.append(("optimizer" if updates else _work_kind(event.name), event))
    # Of several at the same time, each moment counts for the one that began first, work before messages.
    taken = _Taken(step)
    for one in (work, messages):
        for kind, event in sorted(one, key=lambda each: each[1].start_ns):
            yield kind, taken.add(event.start_ns, event.end_ns)
        taken = taken.merged()
    yield "host_gaps", taken.rest()


def _numbers_in_ranges(events: Iterable[Event]) -> set[int]:
    """Numbers of the operators that ran during the optimizer step, on any host thread."""
    host = [event for event in events if not event.on_device]
    ranges = [event for event in host if event.name == OPTIMIZER_RANGE]
    return {
        event.number
        for event in host
        if event.number and any(r.start_ns <= event.start_ns < r.end_ns for r in ranges)
    }


class _Taken:
    """The parts of a step that are already assigned; events are added in the order of their beginnings."""

    def __init__(self, step: Event, pieces: Sequence[tuple[int, int]] = ()) -> None:
        self.step, self.before = step, list(pieces)
        self.pieces: list[tuple[int, int]] = []
        self.reached = step.start_ns
        self.place = 0

    def add(self, start: int, end: int) -> int:
        """Assign a time interval; returns the nanoseconds of it that were free."""
        start, end = max(start, self.reached), min(end, self.step.end_ns)
        if end <= start:
            return 0
        self.reached = end
        self.pieces.append((start, end))
        free = end - start
        while self.place < len(self.before) and self.before[self.place][1] <= start:
            self.place += 1
        for begin, stop in self.before[self.place :]:
            if begin >= end:
                break
            free -= min(stop, end) - max(begin, start)
        return free

    def merged(self) -> _Taken:
        """The assigned intervals so far, for another pass over events from the beginning."""
        union: list[tuple[int, int]] = []
        for start, end in sorted([*self.before, *self.pieces]):
            if union and start <= union[-1][1]:
                union[-1] = union[-1][0], max(end, union[-1][1])
            else:
                union.append((start, end))
        return _Taken(self.step, union)

    def rest(self) -> int:
        """Unassigned nanoseconds of the step."""
        return self.step.end_ns - self.step.start_ns - sum(end - start for start, end in self.before)


def _on_host(step: Event, events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Nanoseconds of each kind of work on the training thread of a CPU rank."""
    messages = sorted(
        (e.start_ns, e.end_ns, kind)
        for e in events
        if (e.overlaps or e.thread != step.thread)
        and (kind := collective_kind(e.name)) is not None
        # A send waits for no other rank.
        and not e.name.endswith(":send")
    )
    own = [e for e in events if e.thread == step.thread and not e.overlaps]
    # Of two events that begin together the longer one calls the other.
    own.sort(key=lambda e: (e.start_ns, -e.end_ns))
    open_events: list[tuple[int, str]] = []
    """Ends and kinds of the intervals around the present moment; the kind of Python code is empty."""
    now = step.start_ns
    for event in [*own, Event("", step.end_ns, step.end_ns)]:
        while open_events and open_events[-1][0] <= event.start_ns:
            end, kind = open_events.pop()
            yield from _piece(kind, now, end, messages)
            now = max(now, end)
        start = max(event.start_ns, step.start_ns)
        yield from _piece(open_events[-1][1] if open_events else "", now, start, messages)
        now = max(now, start)
        above = open_events[-1][1] if open_events else ""
        open_events.append((min(event.end_ns, step.end_ns), _host_kind(event, above)))


def _host_kind(event: Event, above: str) -> str:
    """The kind of a host operator that an operator of the kind `above` called."""
    kind = collective_kind(event.name)
    if kind is not None:
        return kind
    if above and above not in ("elementwise", "range of the optimizer", "range of attention"):
        return above
    if event.name == OPTIMIZER_RANGE or above == "range of the optimizer":
        return "optimizer" if _OPERATOR.match(event.name) else "range of the optimizer"
    in_attention = above == "range of attention" or _ATTENTION.search(event.name) is not None
    if not _OPERATOR.match(event.name):
        return "range of attention" if in_attention else ""
    return "attention" if in_attention else _work_kind(event.name)


def _piece(
    kind: str, start: int, end: int, messages: Sequence[tuple[int, int, str]]
) -> Iterator[tuple[str, float]]:
    """A time interval of one kind of work; without a kind it is waiting or Python."""
    if end <= start:
        return
    if kind and not kind.startswith("range of"):
        yield kind, end - start
        return
    if end - start >= SHORTEST_WAIT_NS:
        longest = max(
            ((min(stop, end) - max(begin, start), what) for begin, stop, what in messages),
            default=(0, ""),
        )
        if longest[0] > 0:
            yield longest[1], longest[0]
            yield "host_gaps", end - start - longest[0]
            return
    yield "host_gaps", end - start
