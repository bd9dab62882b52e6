"""How training scripts take what `planner export` writes: as flags, or as a file that a flag names."""

from __future__ import annotations

from costmodels.dataclass import dataclass


@dataclass(frozen=True)
class ScriptStart:
    """How the training script of a software starts."""

    target: str
    """What plans are exported to."""
    file_flag: str = ""
    """The flag that names the exported file; empty where the export is flags."""
    suffix: str = ""
    """Ending of that file's name."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that it wants, where they are not set."""
    training_flags: bool = False
    """It takes Megatron-LM's flags of training and data."""


_MEGATRONS = (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)

SCRIPT_STARTS = {
    "megatron": ScriptStart("megatron", environment=_MEGATRONS, training_flags=True),
    "mindspeed": ScriptStart("mindspeed", environment=_MEGATRONS, training_flags=True),
    "nemo": ScriptStart("megatron-bridge", "--config-file", ".yaml", _MEGATRONS),
    "torchtitan": ScriptStart("torchtitan"),
    "deepspeed": ScriptStart("deepspeed", "--deepspeed_config", ".json"),
    "nanotron": ScriptStart("nanotron", "--config-file", ".yaml", _MEGATRONS),
}
"""By the name of the engine: those that torchrun starts. Megatron-LM's wants one connection for the order of
kernels that its overlap assumes (megatron/training/arguments.py)."""
