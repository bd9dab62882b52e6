"""Every autograd Function of the runtime, and what a compiler makes of its gradients."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import runtime

WITHOUT_IMPORT = ("__main__", ".summing_kernels")
"""Ends of modules that run something, or need Triton."""


def functions_of_the_runtime() -> Counter[str]:
    """Names of all classes of the package that autograd differentiates, and how many have each."""
    for module in pkgutil.walk_packages(runtime.__path__, "runtime."):
        if not module.name.endswith(WITHOUT_IMPORT):
            importlib.import_module(module.name)
    found: dict[Any, str] = {}
    kinds: list[Any] = [torch.autograd.Function]
    for kind in kinds:
        below: list[Any] = kind.__subclasses__()
        kinds += [one for one in below if one not in kinds]
        if kind.__module__.startswith("runtime."):
            found[kind] = f"{kind.__module__}.{kind.__qualname__}"
    return Counter(found.values())


class Case(NamedTuple):
    """A differentiable function and what it is given."""

    function: Callable[..., Any]
    """A function of tensors alone; returns one, or several."""
    inputs: tuple[Tensor, ...]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers of fp32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results_and_gradients(call: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results of a function, and the gradients of its inputs for drawn gradients of the results."""
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    # Leaves may not be written over, which some collectives do.
    made = call(*(x.view_as(x) + 0 if x.requires_grad else x for x in given))
    results = [made] if isinstance(made, Tensor) else list(made)
    weights = [drawn(*x.shape, seed=1 + number).to(x.dtype) for number, x in enumerate(results)]
    torch.autograd.backward(results, weights)
    gradients = [x.grad for x in given if x.requires_grad]
    assert all(gradient is not None for gradient in gradients)
    return [x.detach() for x in (*results, *gradients)]


def compiled_difference(case: Case, backend: str) -> float:
    """The largest relative difference that a compiler makes to any result or gradient."""
    torch._dynamo.reset()
    expected = results_and_gradients(case.function, case.inputs)
    found = results_and_gradients(torch.compile(case.function, backend=backend, fullgraph=True), case.inputs)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    return max(
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in zip(found, expected, strict=True)
    )
