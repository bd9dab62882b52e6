"""The flags of a Megatron-LM job: their numbers, and the number format."""

from __future__ import annotations

import re

from costmodels.dataclass import dataclass
from costmodels.spec.layout import GATHERS_FP8
from costmodels.spec.model import ModelSpec
from planner.formats.facts.flag_catalogue import GivenFlag
from planner.formats.facts.reading import Problems
from planner.formats.facts.source import Source
from planner.formats.megatron.export import FP8_RECIPES
from planner.formats.megatron.model import Given, unset

EIGHT_BITS = ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3")
"""Flags for 8-bit GEMMs; `--fp8-recipe` gives the recipe."""


@dataclass
class Job:
    """The flags of a job, with their problems."""

    given: Given
    problems: Problems
    framework: str
    model: ModelSpec | None
    deepspeed: Source | None = None
    memory_is_bound: bool = False
    """True if the job keeps less memory than the price assumes."""

    def count(self, name: str) -> int | None:
        """The whole number, from 1, that a flag gives."""
        flag = self.given.get(name)
        if flag is None or not flag.values:
            return None
        if flag.unknown:
            self.problems.add(*unset(flag))
            return None
        text = flag.text.strip()
        if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 10**9 or len(text) > 12:
            said = f"{text!r} is not a whole number from 1"
            self.problems.add("illegal", said, name, flag.line, certain=True)
            return None
        return int(text)

    def batch(self) -> int | None:
        """Sequences of a step; for a batch ramp-up, the final number."""
        flag = self.word("--step-batch-size-schedule")
        if flag is None:
            return self.count("--global-batch-size")
        found = re.findall(r"[0-9.]+[KMBT]?:([1-9][0-9]{0,8})", flag.text)
        if flag.unknown or len(found) != len(flag.text.split()):
            text = f"{flag.text} is no list of TOKENS:BATCH"
            self.problems.add("unknown", text, flag.name, flag.line, "give --define global_batch_size=N")
            return None
        return int(found[-1])

    def is_given(self, *names: str) -> bool:
        """Return whether any flag of `names` is given."""
        return any(name in self.given for name in names)

    def word(self, name: str) -> GivenFlag | None:
        """The value of a flag; None where it is not given."""
        flag = self.given.get(name)
        return flag if flag is not None and flag.values else None

    def precision(self) -> str:
        """The number format of GEMMs."""
        if self.is_given("--fp4-format"):
            return "nvfp4"
        if self.is_given(*EIGHT_BITS):
            recipe = self.word("--fp8-recipe")
            return "mxfp8" if recipe is not None and recipe.text == "mxfp8" else "fp8"
        return "bf16" if self.is_given("--bf16") else "fp16" if self.is_given("--fp16") else "fp32"

    def fp8_recipe(self) -> str:
        """The recipe of fp8 scales, if a flag gives it."""
        flag = self.word("--fp8-recipe")
        if flag is None or self.precision() != "fp8":
            return "default"
        if flag.text in FP8_RECIPES:
            return flag.text
        self.problems.add("note", f"{flag.text} is not priced: taken as delayed", "--fp8-recipe", flag.line)
        return "default"

    def gathers_fp8(self, recipe: str) -> bool:
        """Return whether weights are gathered in fp8 in a way that is priced."""
        flag = self.given.get("--fp8-param-gather")
        if flag is None or recipe in GATHERS_FP8:
            return flag is not None
        self.memory_is_bound = True  # Weights stay in fp8, without copies in 16 bits.
        text = f"not priced but with --fp8-recipe {' or '.join(GATHERS_FP8)}: weights are kept in 16 bits too"
        self.problems.add("note", text, flag.name, flag.line)
        return False

    def names_precision(self) -> bool:
        """Return whether a flag gives the number format."""
        return self.is_given("--bf16", "--fp16", *EIGHT_BITS, "--fp4-format")
