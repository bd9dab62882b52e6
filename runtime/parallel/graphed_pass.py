"""Forward and backward of a microbatch as one CUDA graph.

The host launches the kernels of small layers later than the device could run them. A graph is launched at
once, and is always the same kernels on the same memory. So a pass reads its tokens and labels, the factor of
the loss and the parameters at fixed addresses, and adds gradients to sums at fixed addresses.

Results are bitwise equal. A graph has its own memory, which the optimizer cannot use between passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from costmodels.errors import InputError
from runtime.parallel.accelerator import device_module

Pass = Callable[[], Tensor]
"""A function that runs forward and backward, and returns the loss."""

Capture = Callable[[Pass], Pass]
"""A function that makes an equivalent pass with fixed memory from a pass, without running that pass."""

WARM_UP = 4
"""Passes that run without a graph: kernels are compiled and chosen in the first two, and the fourth one is
the first with chained layers (`runtime.parallel.layer_chain`)."""


class GraphedPass:
    """Passes of microbatches of one shape.

    Args:
        run: forward and backward of tokens and labels, which returns the loss.
        capture: makes a graph of a pass; the device's own way when not given.
    """

    def __init__(
        self, run: Callable[[Tensor, Tensor], Tensor], device: torch.device, capture: Capture | None = None
    ) -> None:
        self.run = run
        # The GPU of a dry run is none.
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        self.stream: Any = device_module(device).Stream(device) if on_gpu else None
        self.capture = capture or (self._cuda_graph if on_gpu else _as_it_is)
        self.inputs: tuple[Tensor, Tensor] | None = None
        self.passes = 0
        self.replay: Pass | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss of a microbatch, [], which the next call may overwrite."""
        if self.inputs is None:
            self.inputs = tokens.clone(), labels.clone()
        else:
            for held, given in zip(self.inputs, (tokens, labels), strict=True):
                held.copy_(given)
        self.passes += 1
        if self.passes <= WARM_UP:
            return self._warm_up()
        if self.replay is None:
            self.replay = self.capture(self._pass)
        return self.replay()

    def end(self) -> None:
        """Free the graph, as communicators with captured collectives cannot end before it."""
        if self.graph is not None:
            self.graph.reset()
        self.graph = self.replay = None

    def _pass(self) -> Tensor:
        assert self.inputs is not None
        return self.run(*self.inputs)

    def _warm_up(self) -> Tensor:
        """Run a pass on the graph's stream, so that autograd nodes belong to it from the start."""
        if self.stream is None:
            return self._pass()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self._pass()
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def _cuda_graph(self, run: Pass) -> Pass:
        self.graph = graph = torch.cuda.CUDAGraph()
        try:
            # Threads of collectives ask for their events meanwhile: only what this thread does is watched.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                loss = run()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"--cuda-graphs: a pass cannot be captured ({reason}); give --pin cuda_graphs=false"
            ) from error

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay


def _as_it_is(run: Pass) -> Pass:
    """A stand-in for capture on devices without graphs, which runs the pass each time."""
    return run
