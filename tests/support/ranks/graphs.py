"""Passes that stand in for CUDA graphs, beside passes as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from costmodels import Layout, ModelSpec
from tests.support.ranks.parity import Training, trained

ASKS_DEVICE = torch.ops.aten._local_scalar_dense.default


class Both(NamedTuple):
    """Training with graphed passes, and without."""

    graphed: Training
    plain: Training
    replayed: int
    """Passes that ran no code of the runtime."""
    asked: int
    """Numbers that a captured pass asks the device for."""
    places: list[set[int]]
    """Addresses of copies of parameters and of sums of gradients, after each pass."""


class _Recording(TorchDispatchMode):
    """Notes every operator with the tensors that it takes and gives, as a capture does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators on the same tensors again."""
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for held, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(held, Tensor) and held.data_ptr() != new.data_ptr():
                    if func.namespace == "_c10d_functional":
                        new = torch.ops._c10d_functional.wait_tensor(new)
                    held.copy_(new)


def graphed_and_plain(spec: ModelSpec, layout: Layout, compiled: bool, records: bool) -> Both:
    """Train three steps in both ways; runs on every rank of a process group.

    Args:
        records: replay what operators did, as a graph does, instead of running passes anew.
    """
    from runtime.parallel import graphed_pass
    from runtime.parallel.working_copies import WorkingCopies
    from runtime.train import executor

    replayed = asked = 0
    copies: list[WorkingCopies] = []
    places: list[set[int]] = []
    make = WorkingCopies.__init__

    def made(own: WorkingCopies, *arguments: Any) -> None:
        make(own, *arguments)
        copies.append(own)

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recording, loss = _Recording(), None

        def replay() -> Tensor:
            nonlocal loss, replayed, asked
            if loss is None:
                with recording:
                    loss = run()
                asked += sum(func is ASKS_DEVICE for func, *_ in recording.calls)
            else:
                replayed += 1
                recording.replay()
            return loss

        return replay

    class Watched(graphed_pass.GraphedPass):
        def __init__(self, run: Any, device: torch.device) -> None:
            super().__init__(run, device, capture if records else None)

        def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
            loss = super().__call__(tokens, labels)
            (own,) = copies
            held = [one for _, sums in own.groups for one in sums._held()]
            places.append({one.data_ptr() for one in [*held, *own.locals.values()]})
            return loss

    torch._dynamo.reset()
    # To single operators: where tensors lie does not depend on kernels, which a C++ compiler takes long for.
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        with patch.object(executor, "GraphedPass", Watched), patch.object(WorkingCopies, "__init__", made):
            graphed = trained(spec, layout.model_copy(update={"cuda_graphs": True}), 3, compiled=compiled)
        torch._dynamo.reset()
        plain = trained(spec, layout, 3, compiled=compiled)
    return Both(graphed, plain, replayed, asked, places)
