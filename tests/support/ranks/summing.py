"""Compiled layers whose GEMMs add weight gradients to sums, and layers with additions apart."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

from costmodels import Layout, ModelSpec
from tests.support.ranks.parity import Training, trained


def in_gemms_and_apart(spec: ModelSpec, layout: Layout) -> tuple[Training, Training, int]:
    """Two steps of training in both ways, and how often a GEMM has got a sum; runs on every rank.

    The CPU stands for a GPU, whose GEMMs add.
    """
    import torch

    from runtime.parallel import working_copies
    from runtime.parallel.working_copies import GradientSums

    receive, received = GradientSums.receive, 0

    def receiving(sums: GradientSums, number: int) -> Any:
        nonlocal received
        received += 1
        return receive(sums, number)

    torch._dynamo.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        with (
            patch.object(GradientSums, "receive", receiving),
            patch.object(working_copies, "sums_in_gemms", lambda *_: True),
            patch.object(working_copies, "adds_in_kernel", lambda *_: True),
        ):
            in_gemms = trained(spec, layout, 2, compiled=True)
        torch._dynamo.reset()
        with (
            patch.object(working_copies, "sums_in_gemms", lambda *_: False),
            patch.object(working_copies, "adds_in_kernel", lambda *_: False),
        ):
            return in_gemms, trained(spec, layout, 2, compiled=True), received
