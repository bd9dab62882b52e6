"""The device `cpu`: one rank's share of this machine, from the reports of its operating system.

All figures are peaks or assumptions that take milliseconds to look up; nothing is measured.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from costmodels.dataclass import dataclass
from costmodels.spec.hardware import Device, Link, Precision

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
MAXIMAL_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")

TURBO = 1.42
"""Highest over nominal clock, for virtual machines that show only the nominal one. Server processors have 1.3
to 1.55 (AMD EPYC 9R14: 3.7 over 2.6 GHz)."""

DEFAULT_CLOCK = 3.2e9
"""Clock in hertz where the system states none (Apple silicon, many ARM servers)."""

DEFAULT_MEMORY = 8 * 2.0**30
"""Bytes of memory where the system states no size."""

CORE_BANDWIDTH = 28.0e9
"""Bytes per second that one core moves while the others are idle (28 GB/s measured on an AMD EPYC of
2023)."""

MACHINE_BANDWIDTH = 80.0e9
"""Bytes per second at which a small machine saturates: two channels of DDR5-5600 have 90 GB/s."""

BANDWIDTH_PER_CORE = 5.0e9
"""Share of one core when all cores of a server read (12 channels of DDR5-4800 for 96 cores)."""

CONTEXT_BYTES = {"cpu": 0.387e9, "cuda": 0.502e9}
"""Resident bytes of a rank that trains a tiny model, by build of torch (2.13 for CPUs and 2.15 with CUDA 13
measured; the latter's libraries are mapped even where there is no GPU)."""


@dataclass(frozen=True)
class Core:
    """Peak of one core: FLOP per cycle by number format, and clock in hertz."""

    flops_per_cycle: dict[Precision, float]
    clock: float


def host_device(ranks: int = 1) -> Device:
    """This machine divided by `ranks` processes: compute, memory and bandwidth of one of them."""
    cores = available_cores()
    cpuinfo = _read(CPUINFO)
    core = describe_core(cpuinfo, _number(_read(MAXIMAL_CLOCK)) * 1e3)
    bandwidth = min(cores * CORE_BANDWIDTH, max(MACHINE_BANDWIDTH, cores * BANDWIDTH_PER_CORE))
    share = cores / ranks
    return Device(
        name="cpu",
        vendor=_field(cpuinfo, "vendor_id") or platform.machine() or "unknown",
        kind="cpu",
        architecture="cpu",
        peak_flops={kind: flops * core.clock * share for kind, flops in core.flops_per_cycle.items()},
        memory_bytes=available_memory() / ranks,
        memory_bandwidth=bandwidth / ranks,
        host_bandwidth=bandwidth / ranks,
        host_memory_bandwidth=bandwidth / ranks,
        cores=max(1, cores // ranks),
        intra_node=Link(name="loopback", bandwidth=2.6e9, latency=_loopback_latency(ranks / cores)),
        inter_node=Link(name="Ethernet 10G", bandwidth=1.25e9, latency=100e-6),
        sharers=max(1.0, ranks / cores),
        devices_per_node=max(cores, ranks),
        context_bytes=CONTEXT_BYTES[torch_build()],
        source="this machine: its processors' features and clock, its memory; bandwidths are assumed",
    )


def _loopback_latency(sharers: float) -> float:
    """Seconds of a hop of gloo over the loopback device, by the ranks that share a core.

    Messages between two processes were measured with 2.6 GB/s and 60 us. A rank that waits for a core delays
    all others. A layer's collectives took 3.5 ms among 2 ranks on 2 cores, 12 ms among 4, and 48 ms among 8.
    """
    return 60e-6 if sharers <= 1 else 2e-4 * sharers**2


def torch_build() -> str:
    """`cuda` if the installed torch carries CUDA's libraries, else `cpu`; found without importing torch."""
    found = find_spec("torch")
    folders = (found.submodule_search_locations or []) if found else []
    return "cuda" if any(Path(folder, "lib", "libtorch_cuda.so").exists() for folder in folders) else "cpu"


@functools.cache
def available_cores() -> int:
    """Cores that this process may run on, at the first call; ranks of a CPU bind their threads later."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """The name of the processor's model, from the operating system."""
    name = _field(_read(CPUINFO), "model name") or platform.processor() or platform.machine()
    return name or "unknown"


def available_memory() -> float:
    """Bytes of memory of the machine, or of the container if it has less."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", _read(MEMINFO), re.MULTILINE)
    if match:
        total = float(match[1]) * 1024
    else:
        try:
            total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        except (ValueError, OSError, AttributeError):
            total = DEFAULT_MEMORY
    limits = [_number(_read(path)) for path in CGROUP_LIMITS]
    return min([total, *(limit for limit in limits if limit > 0)])


def describe_core(cpuinfo: str, maximal_clock: float = 0.0) -> Core:
    """The peak of one core from the text of /proc/cpuinfo; `maximal_clock` in hertz, 0 if unknown.

    Fused multiply-adds of two vector units: 2 x 2 x lanes FLOP per cycle. Sources: Agner Fog's
    instruction tables, AMD's and Intel's optimization manuals.
    """
    flags = set(_field(cpuinfo, "flags").split()) | set(_field(cpuinfo, "Features").split())
    nominal = _number(_field(cpuinfo, "cpu MHz")) * 1e6
    clock = maximal_clock or nominal * TURBO or DEFAULT_CLOCK
    flops: dict[Precision, float] = {}
    if platform.machine().lower() in ("arm64", "aarch64") and not _field(cpuinfo, "vendor_id"):
        # ARM's server cores have two units of 128 or, with SVE, 256 bits. Apple's libraries use a matrix
        # unit that a cluster of cores shares: about 64 for each core (1.6 TFLOP/s on the 8 of an M1).
        flops["fp32"] = 64.0 if sys.platform == "darwin" else 32.0 if "sve" in flags else 16.0
        if "bf16" in flags:
            flops["bf16"] = 4 * flops["fp32"]
        return Core(flops, clock)
    amd = _field(cpuinfo, "vendor_id") == "AuthenticAMD"
    family = int(_number(_field(cpuinfo, "cpu family")))
    # AMD runs 512-bit instructions in two halves before Zen 5 (family 26); of Intel's parts only
    # Xeons have a second 512-bit unit.
    full_512 = family >= 26 if amd else "Xeon" in _field(cpuinfo, "model name")
    zen1 = amd and family == 23 and _number(_field(cpuinfo, "model")) < 0x30
    if "avx512f" in flags and full_512:
        flops["fp32"] = 64.0
    elif ("fma" in flags and not zen1) or not flags:
        flops["fp32"] = 32.0
    elif "fma" in flags or "avx" in flags:
        flops["fp32"] = 16.0
    else:
        flops["fp32"] = 8.0
    if "amx_bf16" in flags:
        flops["bf16"] = 2048.0
    elif "avx512_bf16" in flags:
        # One dot product of 32 pairs a cycle, two on Zen 5.
        flops["bf16"] = 128.0 if amd and full_512 else 64.0
    return Core(flops, clock)


def _field(cpuinfo: str, key: str) -> str:
    match = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else ""


def _read(path: Path, size: int = 8192) -> str:
    """The first `size` characters of a system file, or nothing; the first core represents all."""
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        return file.read(size)
    return ""


def _number(text: str) -> float:
    match = re.match(r"\s*\d+(\.\d+)?", text)
    return float(match[0]) if match else 0.0
