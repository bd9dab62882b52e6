"""The runtime asks PyTorch for its devices, and names none of them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.job import devices
from runtime.parallel import accelerator
from tests.support import ROOT


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "xccl")])
def test_collectives_are_those_of_the_device(kind: str, backend: str) -> None:
    device = torch.device(kind)
    assert accelerator.collective_backend(device) == backend
    assert accelerator.is_accelerator(device) == (kind != "cpu")


@pytest.mark.parametrize(("found", "count"), [("xpu", 4), ("mps", 0), (None, 0)])
def test_other_accelerators_are_counted_and_given_to_ranks(
    found: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = None if found is None else torch.device(found)
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: here)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert devices.local_device_count() == count
    if count:
        ranks: Any = SimpleNamespace(local_world_size=4, local_rank=3)
        assert devices.torch_device(False, ranks) == torch.device("xpu", 3)


def test_only_what_is_about_cuda_names_it() -> None:
    """Kernels, formats and page-locking of NVIDIA's and AMD's cards; dry runs and checks of machines."""
    about = {"model/routing.py", "model/attention_kernels.py", "parallel/float8.py", "checkpoint/writer.py"}
    named = {
        str(file.relative_to(ROOT / "runtime"))
        for file in (ROOT / "runtime").rglob("*.py")
        if re.search(r"torch\.cuda\.|\"nccl\"", file.read_text(encoding="utf-8"))
    }
    assert {name for name in named if not name.startswith(("dryrun/", "preflight/"))} <= about
