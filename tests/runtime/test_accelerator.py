"""The runtime asks PyTorch for its devices, and names none of them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.calibrate import collectives, kernels
from runtime.job import devices
from runtime.parallel import accelerator
from runtime.preflight import speed
from runtime.preflight.report import rank_report
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
    """Kernels, formats, graphs and page-locking of cards of NVIDIA and AMD; dry runs; checks of machines."""
    about = {"model/routing.py", "model/attention_kernels.py", "parallel/float8.py", "checkpoint/writer.py"}
    about |= {"parallel/graphed_pass.py", "model/flash_linear_attention.py", "parallel/summing_linear.py"}
    about |= {"parallel/summing_kernels.py", "parallel/summing_trial.py", "job/attention_choice.py"}
    about |= {"model/attention_switches.py", "parallel/attention_trial.py"}
    named = {
        str(file.relative_to(ROOT / "runtime"))
        for file in (ROOT / "runtime").rglob("*.py")
        if re.search(r"torch\.cuda\.|\"nccl\"", file.read_text(encoding="utf-8"))
    }
    assert {name for name in named if not name.startswith(("dryrun/", "preflight/"))} <= about


def test_checks_and_measurements_know_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("xpu", 0)
    waited: list[torch.device] = []
    module = SimpleNamespace(
        synchronize=waited.append,
        get_device_name=lambda device: "Ascend 910B",
        mem_get_info=lambda device: (60, 64),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    report = rank_report(0, 1, device, [], 0.0)
    assert (report.device, report.free_bytes, report.memory_bytes) == ("Ascend 910B", 60, 64)
    assert speed.seconds_of(lambda: None, device) > 0
    assert waited == [device, device]
    for sizes in (
        speed.GEMM_SIZE,
        speed.MOST_BYTES,
        speed.SLOW_DEVICE,
        collectives.SIZES,
        kernels.COPY_BYTES,
    ):
        assert accelerator.kind_of(device) in sizes
