"""GPUs of a machine in the words of the catalogue."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from costmodels.errors import InputError
from runtime.job import devices


def found(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(devices, "local_device_count", lambda: 1)
    card = SimpleNamespace(name=name, total_memory=10**10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    device = devices.detect_device(1)
    assert device.memory_bytes == 1e10
    return device.name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GB200", "gb200"),
        ("Tesla V100-SXM2-16GB", "v100-16g"),
    ],
)
def test_names_of_drivers_are_known(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(name, monkeypatch) == expected


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40", "NVIDIA A1000", "T400"])
def test_a_card_that_is_like_none_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=f"{name} is not in the catalogue; give --device NAME"):
        found(name, monkeypatch)
