"""`runtime.parallel.recomputation` on the names of sizes: calls of which the graph keeps the inputs only."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from costmodels.bundled.replay import ACTIVATIONS, Node, Packed, Storage, Tape, Tensor

Forward = Callable[..., Tensor]


class _Enough(Exception):
    """All that backward needs has been computed."""


def recomputed(tape: Tape, function: Forward, drop_output: bool = False) -> Forward:
    """`function`, whose internals backward computes again; with `drop_output` its result too."""

    def again(*inputs: Tensor) -> Tensor:
        if not tape.records:
            result: Tensor = function(*inputs)
            return result
        call = _Call(tape, function, inputs)
        result = call.run(*inputs)
        if drop_output and tape.outputs:
            tape.outputs[-1].append((weakref.ref(result.storage), call))
        return result

    return again


def dropping_outputs(tape: Tape, function: Forward) -> Forward:
    """`function`, in which tensors that it computes again from outputs of a call are not saved."""

    def dropping(x: Tensor) -> Tensor:
        if not tape.records:
            result: Tensor = function(x)
            return result
        tape.outputs.append([])
        tape.hooks.append(partial(_pack, tape))
        try:
            result = function(x)
        finally:
            tape.hooks.pop()
            tape.outputs.pop()
        return result

    return dropping


def _pack(tape: Tape, storage: Storage) -> Packed:
    for reference, call in tape.outputs[-1] if tape.outputs else ():
        if reference() is storage:
            packed: Packed = call.pack_output()
            return packed
    return storage


class _Call:
    def __init__(self, tape: Tape, function: Forward, inputs: tuple[Tensor, ...]) -> None:
        self.tape, self.function = tape, function
        # The node is never run: it keeps what the call reads.
        self.anchor = Node(tape, [], [one.storage for one in inputs], lambda node, grads: [])
        self.needs = [one.edge is not None for one in inputs]
        self.saved = 0
        self.internals: dict[int, Storage] = {}
        self.served = False
        self.views = self.unpacked_views = 0
        self.output: Storage | None = None

    def run(self, *inputs: Tensor) -> Tensor:
        """Forward, without keeping what it saves."""
        self.tape.hooks.append(self._pack_internal)
        try:
            result: Tensor = self.function(*inputs)
        finally:
            self.tape.hooks.pop()
        return result

    def pack_output(self) -> Packed:
        """What stands for the output."""
        self.views += 1
        return self._output

    def _pack_internal(self, storage: Storage) -> Packed:
        self.saved += 1
        return partial(self._internal, self.saved - 1)

    def _internal(self, number: int) -> Storage:
        if number not in self.internals:
            self._run_again(with_internals=True)
        storage = self.internals.pop(number)
        self.served = self.served or not self.internals
        return storage

    def _output(self) -> Storage:
        if self.output is None:
            self._run_again(with_internals=not self.served)
        output = self.output
        assert output is not None
        self.unpacked_views += 1
        if self.unpacked_views == self.views:
            self.unpacked_views, self.output = 0, None
        return output

    def _run_again(self, with_internals: bool) -> None:
        with_output = self.views > 0 and (not self.served or not with_internals)
        tape, grows = self.tape, self.tape.records
        source = Node(tape, [], [], lambda node, grads: [])
        inputs = [
            Tensor(storage, (source, 0) if needs else None)
            for storage, needs in zip(self.anchor.unpack(), self.needs, strict=True)
        ]
        found: list[Storage] = []

        def capture(storage: Storage) -> Packed:
            found.append(storage)
            storage.become(ACTIVATIONS)
            if len(found) == self.saved and not with_output:
                raise _Enough
            return _nothing

        tape.records = with_internals
        tape.hooks.append(capture)
        try:
            output = self.function(*inputs)
            if with_output or not with_internals:
                self.output = output.storage
            del output
        except _Enough:
            pass
        finally:
            tape.hooks.pop()
            tape.records = grows
        if with_internals:
            self.internals = dict(enumerate(found))
            if self.served:
                self._forget_last()

    def _forget_last(self) -> None:
        """Drop what the call before computed again for gradients of weights, and these have not read."""
        last = self.tape.again()
        if last is not None and last is not self:
            last.internals.clear()
        self.tape.again = weakref.ref(self)


def _nothing() -> Storage:
    raise AssertionError("a graph that is computed again has no backward")
