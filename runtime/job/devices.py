"""The devices of this machine, by catalogue name.

Run as a program, it prints the number of GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from costmodels import Device
from costmodels.catalogue import load_device
from costmodels.errors import InputError
from planner.inputs.device import resolve_device
from planner.plan import Plan
from runtime.parallel.accelerator import accelerator_count, accelerator_type, device_module
from runtime.parallel.ranks import Ranks

CATALOGUE_NAMES = (
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("H200", "h200"),
    ("H20", "h20"),
    ("H800", "h800"),
    ("H100 PCIe", "h100-pcie"),
    ("H100", "h100"),
    ("A800", "a800-80g"),
    ("A100-PCIE-40GB", "a100-pcie-40g"),
    ("A100 80GB PCIe", "a100-pcie-80g"),
    ("A100-SXM4-40GB", "a100-40g"),
    ("A100", "a100-80g"),
    ("L40S", "l40s"),
    ("V100-SXM2-16GB", "v100-16g"),
    ("V100-PCIE-16GB", "v100-16g"),
    ("V100", "v100-32g"),
    ("MI300X", "mi300x"),
    ("MI250X", "mi250x"),
    ("RTX 4090$", "rtx-4090"),
    ("RTX 5090$", "rtx-5090"),
    ("A10G?", "a10"),
    ("L4", "l4"),
    ("T4", "t4"),
)
"""Patterns of the driver's device name, and the catalogue's name; the first match counts.

Laptop cards have other sizes under the same names with a further word.
"""


def local_device_count() -> int:
    """Number of GPUs, or other accelerators, of this machine."""
    return accelerator_count()


def torch_device(on_cpu: bool, ranks: Ranks) -> torch.device:
    """The device of a rank; raises `InputError` where this machine has too few."""
    if on_cpu:
        return torch.device("cpu")
    if ranks.local_world_size > local_device_count():
        raise InputError(
            f"{ranks.local_world_size} ranks on a machine of {local_device_count()} GPUs; "
            f"start at most {local_device_count()} or give --device cpu"
        )
    return torch.device(accelerator_type() or "cpu", ranks.local_rank)


def detect_device(ranks: int) -> Device:
    """The catalogue entry of this machine's GPUs, with their actual memory; else its CPU.

    Args:
        ranks: CPU ranks that share the machine when there is no GPU.
    """
    return (
        _gpu(lambda name: resolve_device(name, ranks))
        if local_device_count()
        else resolve_device("cpu", ranks)
    )


def catalogue_device() -> Device:
    """The catalogue entry of this machine's GPUs, without measured values."""
    return _gpu(load_device)


def _gpu(load: Callable[[str], Device]) -> Device:
    properties = device_module(torch.device(accelerator_type() or "cuda")).get_device_properties(0)
    for part, name in CATALOGUE_NAMES:
        if re.search(rf"\b{part}(?!\w)", properties.name, re.IGNORECASE):
            return load(name).model_copy(update={"memory_bytes": float(properties.total_memory)})
    raise InputError(
        f"this machine's {properties.name} is not in the catalogue; give --device NAME (see `planner "
        "devices`), --device FILE.yaml or --device cpu"
    )


def check_kind(plan: Plan, ranks: Ranks) -> None:
    """Raise `InputError` where a plan for two kinds of nodes has the other kind for this machine's ranks."""
    parts = plan.cluster.parts
    if not parts or not local_device_count():
        return
    border = parts[0].world_size
    own, other = (part.device.name for part in (parts if ranks.rank < border else parts[::-1]))
    if detect_device(ranks.local_world_size).name == other != own:
        raise InputError(
            f"rank {ranks.rank} is on {other}, where the plan has {own}: start ranks 0 to {border - 1} on "
            f"{parts[0].device.name}, and the others on {parts[1].device.name}"
        )


if __name__ == "__main__":
    print(local_device_count())
