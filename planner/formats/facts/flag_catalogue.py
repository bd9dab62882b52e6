"""The flags of Megatron-LM, MindSpeed and llmacc: the role of each, and the number of words that follow
it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from costmodels.catalogue.yaml_files import parse
from costmodels.dataclass import dataclass
from costmodels.spelling import nearest
from planner.formats.shell.text import Word
from planner.options.batch import BatchOptions
from planner.options.flags import flag_names
from planner.options.megatron import AcceptedFlags
from planner.options.model import ModelOptions
from planner.options.parallel import ParallelOptions

FILE = Path(__file__).with_name("megatron_flags.yaml")

Role = Literal[
    "model", "batch", "layout", "special", "training", "harmless", "unpriced", "unsupported", "unknown"
]
"""The effect of a flag on the answer; flags of the first four roles determine the price."""

OWN_GROUPS: tuple[tuple[Role, type], ...] = (
    ("model", ModelOptions),
    ("batch", BatchOptions),
    ("layout", ParallelOptions),
)
"""Groups of the planner's own flags that have the same meaning in the software."""

_NOT_THEIRS = {
    "model",
    "pin",
    "forbid",
    "engine",
    "objective",
    "pipeline_schedule",
    "data_parallel_size",
    "fp8",
    "fp8_recipe",
    "fp8_param_gather",
    "expert_halves",
    "cuda_graphs",
    "mxfp8",
    "nvfp4",
    "fp32",
}
"""Fields whose flags do not exist in Megatron-LM, or have another meaning there."""


@dataclass(frozen=True)
class KnownFlag:
    """A flag of a framework's argument parser."""

    name: str
    role: Role
    words: str
    """The number of words that follow the flag: none (an empty text), `1`, `+` or `*`."""
    framework: str
    """The software that has the flag: `megatron`, `mindspeed` or `llmacc`."""
    about: str = ""
    field: str = ""
    """The field of the planner's own options that the flag gives."""


@dataclass(frozen=True)
class GivenFlag:
    """A flag as a script gives it."""

    name: str
    values: tuple[Word, ...]
    line: int
    known: KnownFlag

    @property
    def text(self) -> str:
        """The flag's values with blanks between them."""
        return " ".join(word.text for word in self.values)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Variables in the flag's values that the script does not set."""
        return tuple(dict.fromkeys(name for word in self.values for name in word.unknown))


@cache
def known_flags() -> dict[str, KnownFlag]:
    """All flags by name."""
    found: dict[str, KnownFlag] = {}
    accepted = {field.name for field in dataclasses.fields(AcceptedFlags)}
    for role, group in OWN_GROUPS:
        hints = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            if field.name in accepted or field.name in _NOT_THEIRS:
                continue
            words = "" if hints[field.name] is bool else "1"
            name = flag_names(field)[0]
            found[name] = KnownFlag(name, role, words, "megatron", str(field.metadata["help"]), field.name)
    for framework, groups in parse(FILE.read_text(encoding="utf-8"), FILE.name).items():
        for role, group in groups.items():
            about = group.get("about", "")
            for name, words in _listed(" ".join(text for key, text in group.items() if key != "about")):
                own = found.get(name)
                found[name] = KnownFlag(
                    name,
                    own.role if own else role,
                    words,
                    own.framework if own else framework,
                    own.about if own else about,
                    own.field if own else "",
                )
    for name in MINDSPEEDS:
        found[name] = dataclasses.replace(found[name], framework="mindspeed")
    return found


MINDSPEEDS = ("--swap-attention", "--recompute-activation-function")
"""The planner's flags that exist in MindSpeed, but not in Megatron-LM."""


def _listed(text: str) -> Iterator[tuple[str, str]]:
    for word in text.split():
        name, _, words = word.partition("=")
        yield name, words


def given_flags(
    words: Sequence[Word], own: Callable[[str], KnownFlag | None] = lambda name: None
) -> tuple[list[GivenFlag], list[Word]]:
    """The flags of a command line, and the words that belong to no flag.

    An unknown flag takes the words after it up to the next flag, as argparse would.

    Args:
        own: flags of the program; they take precedence over the catalogue.
    """
    known = known_flags()
    found: list[GivenFlag] = []
    loose: list[Word] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("--") or len(word.text) < 3:
            loose.append(word)
            continue
        name, equals, value = word.text.partition("=")
        flag = (
            own(name) or known.get(name) or KnownFlag(name, "unknown", "*", "megatron", nearest(name, known))
        )
        values: list[Word] = [_bare(dataclasses.replace(word, text=value))] if equals else []
        most = {"": 0, "1": 1}.get(flag.words, len(words))
        while at < len(words) and len(values) < most and not _is_flag(words[at]):
            values.append(_bare(words[at]))
            at += 1
        found.append(GivenFlag(name, tuple(values), word.line, flag))
    return found, loose


def _bare(word: Word) -> Word:
    """A value without quotes that `eval` would remove."""
    text = word.text
    if len(text) > 2 and text[0] == text[-1] and text[0] in "'\"":
        return dataclasses.replace(word, text=text[1:-1])
    return word


def _is_flag(word: Word) -> bool:
    return word.text.startswith("--") and len(word.text) > 2
