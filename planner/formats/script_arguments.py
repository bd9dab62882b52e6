"""Arguments of training scripts for a plan and for flags of training: flags, or a flag with a file name."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.dataclass import dataclass
from planner.formats.facts.flag_catalogue import known_flags


@dataclass(frozen=True)
class ScriptStart:
    """The form of the arguments of a software's training script."""

    target: str
    """The name of the format to which plans are exported."""
    file_flag: str = ""
    """The flag that names the exported file; empty where the export is flags."""
    suffix: str = ""
    """Suffix of that file's name."""
    training_flags: bool = False
    """True if the script accepts Megatron-LM's flags of training and data."""


SCRIPT_STARTS = {
    "megatron": ScriptStart("megatron", training_flags=True),
    "mindspeed": ScriptStart("mindspeed", training_flags=True),
    "nemo": ScriptStart("megatron-bridge", "--config-file", ".yaml"),
    "torchtitan": ScriptStart("torchtitan"),
    "deepspeed": ScriptStart("deepspeed", "--deepspeed_config", ".json"),
    "nanotron": ScriptStart("nanotron", "--config-file", ".yaml"),
}
"""Programs by engine name, for engines whose ranks torchrun or a scheduler starts."""

SAVE_INTERVAL = 1000
"""Default steps between checkpoints, as Megatron-LM requires a value and has no default."""


def passed_on(words: Sequence[str], start: ScriptStart) -> tuple[list[str], list[str]]:
    """Flags of training, data and output with their values: those that a script accepts, and the others."""
    known = known_flags()
    passed, kept = list[str](), list[str]()
    taken = False
    for word in words:
        if word.startswith("--"):
            taken = start.training_flags and word in known and known[word].framework == "megatron"
        (passed if taken else kept).append(word)
    return passed, kept


def resuming_flags(words: Sequence[str], start: ScriptStart) -> tuple[list[str], list[str]]:
    """Flags that make a Megatron-LM script save on SIGTERM and resume when started again, and notes.

    megatron/training/training.py: `--exit-signal-handler` saves after the running step, `--load` of an empty
    folder begins anew, and `--save` wants `--save-interval`.
    """
    if not start.training_flags:
        return [], []
    found, notes = ["--exit-signal-handler"], list[str]()
    if "--exit-signal-handler" in words:
        found = []
    if "--save" not in words:
        return found, notes
    folder = words[words.index("--save") + 1]
    if "--save-interval" not in words:
        found += ["--save-interval", str(SAVE_INTERVAL)]
        notes.append(f"--save without --save-interval: it saves every {SAVE_INTERVAL} steps")
    if "--load" not in words:
        found += ["--load", folder]
    elif words[words.index("--load") + 1] != folder:
        base = words[words.index("--load") + 1]
        notes.append(f"--load {base}: a job that is started again begins from that again, not from {folder}")
    return found, notes
