"""Arguments of training scripts for a plan and for flags of training: flags, or a file that a flag names."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.dataclass import dataclass
from planner.formats.facts.flag_catalogue import known_flags


@dataclass(frozen=True)
class ScriptStart:
    """The arguments with which the training script of a software starts."""

    target: str
    """The format to which plans are exported."""
    file_flag: str = ""
    """The flag that names the exported file; empty where the export is flags."""
    suffix: str = ""
    """Ending of that file's name."""
    training_flags: bool = False
    """The script takes Megatron-LM's flags of training and data."""


SCRIPT_STARTS = {
    "megatron": ScriptStart("megatron", training_flags=True),
    "mindspeed": ScriptStart("mindspeed", training_flags=True),
    "nemo": ScriptStart("megatron-bridge", "--config-file", ".yaml"),
    "torchtitan": ScriptStart("torchtitan"),
    "deepspeed": ScriptStart("deepspeed", "--deepspeed_config", ".json"),
    "nanotron": ScriptStart("nanotron", "--config-file", ".yaml"),
}
"""Programs by the name of the engine: those whose ranks torchrun or a scheduler starts."""

SAVE_INTERVAL = 1000
"""Steps between checkpoints where nobody says: Megatron-LM has no default, and wants one."""


def passed_on(words: Sequence[str], start: ScriptStart) -> tuple[list[str], list[str]]:
    """Flags of training, data and output: those that a script takes, and the others, with their values."""
    known = known_flags()
    passed, kept = list[str](), list[str]()
    taken = False
    for word in words:
        if word.startswith("--"):
            taken = start.training_flags and word in known and known[word].framework == "megatron"
        (passed if taken else kept).append(word)
    return passed, kept


def resuming_flags(words: Sequence[str], start: ScriptStart) -> tuple[list[str], list[str]]:
    """Flags by which a script of Megatron-LM saves on SIGTERM and goes on when started again, and notes.

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
