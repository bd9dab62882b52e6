"""What happens in a unit besides allocations: marks at which others act, and gradients of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from costmodels.tapes.tape import (
    BACKWARD,
    BACKWARD_END,
    EXPERTS,
    FETCHED,
    FETCHES,
    FETCHES_BEFORE,
    FORWARD,
    FORWARD_END,
    FURTHER,
    LAYER,
    SEEN,
)
from runtime.dryrun.tracker import Tracker, inner_tensors
from runtime.model.experts import MixtureOfExperts
from runtime.model.multi_token import FurtherToken
from runtime.model.transformer import Block
from runtime.parallel import offload

Note = tuple[int, str, int, Any]
"""Changes in the log before it, what: "mark", "gradient" or "addend", the storage, and the name of the mark
or the number of the parameter."""


class Notes:
    """A list of notes, in the order of a tracker's log."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.found: list[Note] = []
        self.sees = False
        """Gradients of weights come apart from others: what is wrapped ends by itself each time."""

    def mark(self, name: str, once: bool = False) -> None:
        """Something happens here; with `once`, the first time only."""
        if not once or all(text != name for *_, text in self.found):
            self.found.append((len(self.tracker.numbers), "mark", -1, name))

    def gradient(self, parameter: int, gradient: Tensor, kind: str = "gradient") -> None:
        """The gradient of a parameter is there, or an "addend" of it."""
        self.found.append((len(self.tracker.numbers), kind, self.block(gradient), parameter))

    def block(self, tensor: Tensor) -> int:
        """The number that the tracker has for the storage of a tensor."""
        (inner,) = inner_tensors(tensor)
        return self.tracker.alive[inner.untyped_storage()._cdata][0]


class _Around(torch.autograd.Function):
    """What FSDP2 puts around the inputs of what it wraps: its backward comes when theirs is done."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.then()
        return None, *grads


def watched_groups(module: nn.Module, notes: Notes) -> dict[int, str]:
    """Note where FSDP2 acts around what it wraps within a unit; the groups of its parameters by their ids."""
    found: dict[int, str] = {}
    further: list[FurtherToken] = []
    for part in module.modules():
        if isinstance(part, FurtherToken):
            further.append(part)
        elif isinstance(part, Block) and not further:
            found |= _watched_experts(part, EXPERTS, notes)
    for depth, part in enumerate(further, start=1):
        group = f"{FURTHER}{depth}"
        found |= _watched(part, group, notes)
        found |= _watched(part.block, f"{group}_{LAYER}", notes)
        found |= _watched_experts(part.block, f"{group}_{EXPERTS}", notes)
    return found


def _watched_experts(block: nn.Module, group: str, notes: Notes) -> dict[int, str]:
    """The same of the experts of a layer, which come and go with it where a compiler takes them together."""
    mixture = getattr(block, "mlp", None)
    if not isinstance(mixture, MixtureOfExperts):
        return {}
    if not mixture.is_whole:
        return _watched(mixture.experts, group, notes)
    _watched(block, group, notes)
    return {id(parameter): group for parameter in mixture.experts.parameters()}


def _watched(module: nn.Module, group: str, notes: Notes) -> dict[int, str]:
    """Note where FSDP2 acts around a module that it wraps."""

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
        notes.mark(group + FORWARD)
        tensors = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        if not tensors:
            return inputs
        wrapped = iter(_Around.apply(partial(notes.mark, group + BACKWARD_END), *tensors))  # type: ignore[no-untyped-call]
        return tuple(next(wrapped) if any(x is t for t in tensors) else x for x in inputs)

    def begins(_: Tensor) -> None:
        notes.mark(group + BACKWARD)
        if notes.sees:
            # As `FSDPState._register_root_post_backward_final_callback`.
            torch.autograd.Variable._execution_engine.queue_callback(partial(notes.mark, SEEN))  # type: ignore[attr-defined]

    def after(_: nn.Module, __: Any, result: Tensor) -> None:
        notes.mark(group + FORWARD_END)
        if result.requires_grad:
            result.register_hook(begins)  # type: ignore[no-untyped-call]

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    return {id(parameter): group for parameter in module.parameters()}


@contextmanager
def watched_offloading(notes: Notes) -> Iterator[None]:
    """Note when a layer starts its copies from host memory, and those of the unit before it."""
    fetch, start = offload._Layer.fetch, offload._start

    def fetching(layer: Any) -> None:
        begins = not layer.fetched
        if begins:
            notes.mark(FETCHES)
        fetch(layer)
        if begins:
            notes.mark(FETCHED)

    def starting(reference: Callable[[], Any]) -> None:
        if reference() is not None:
            start(reference)
        else:
            notes.mark(FETCHES_BEFORE, once=True)

    with patch.object(offload._Layer, "fetch", fetching), patch.object(offload, "_start", starting):
        yield


def watch_addends(y: Tensor, named: Sequence[tuple[str, Tensor]], notes: Notes) -> None:
    """Note the gradients that autograd adds up to that of a parameter, which is used several times."""
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    uses: dict[int, list[tuple[Any, int]]] = {}
    nodes, seen = [y.grad_fn], {y.grad_fn}
    while nodes:
        node: Any = nodes.pop()
        for place, (after, _) in enumerate(() if node is None else node.next_functions):
            number = numbers.get(id(getattr(after, "variable", None)))
            if number is not None:
                uses.setdefault(number, []).append((node, place))
            elif after not in seen:
                seen.add(after)
                nodes.append(after)
    for number, users in uses.items():
        for node, place in users if len(users) > 1 else ():
            node.register_hook(partial(_addend_comes, notes, number, place))


def _addend_comes(notes: Notes, number: int, place: int, gradients: Sequence[Any], _: Any) -> None:
    notes.gradient(number, gradients[place], "addend")
