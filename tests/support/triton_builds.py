"""Triton kernels compiled for a device that is not here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}
"""Memory that a block of threads can share, by compute capability (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability")."""


class Build(NamedTuple):
    """A kernel for a device."""

    ptx: str
    shared: int
    """Bytes that a block of threads shares."""
    registers: int
    spilled: int
    """Bytes of registers that a thread writes to memory, and reads again."""


def build(
    kernel: Any, types: Mapping[str, str], aligned: set[str], options: Mapping[str, Any], capability: int
) -> Build:
    """A kernel compiled as for a launch.

    Args:
        types: Triton's types of the arguments by name; 1 where that is the value.
        aligned: arguments that are multiples of 16.
        options: constants of the kernel, and options of the compiler.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in kernel.params]
    constants = {name: value for name, value in options.items() if name in names}
    constants |= {name: 1 for name, value in types.items() if value == "1"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    made = triton.compile(
        ASTSource(
            kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={name: value for name, value in options.items() if name not in names},
    )
    used = _assembled(made.asm["ptx"], capability)
    [registers] = re.findall(r"Used (\d+) registers", used)
    return Build(
        ptx=made.asm["ptx"],
        shared=made.metadata.shared,
        registers=int(registers),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", used))),
    )


def _assembled(ptx: str, capability: int) -> str:
    """Messages of the assembler that Triton brings."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    program = folder / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    [target] = re.findall(r"\.target (\w+)", ptx)
    command: list[Path | str] = [program, "-v", f"--gpu-name={target}", "-o", "/dev/null", "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
