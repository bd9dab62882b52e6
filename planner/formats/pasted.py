"""Commands that accept a pasted training command: flags of Megatron-LM's internals are ignored, with a
note."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.options.command import Command

if TYPE_CHECKING:
    from planner.formats.facts.flag_catalogue import KnownFlag

INTERNAL = (
    r"--(no-)?("
    r"log-|tensorboard-|wandb-|one-logger|enable-one-logger|app-tag-|otel-|timing-log|barrier-with|straggler-"
    r"|disable-straggler|profile-|use-pytorch-profiler|pytorch-profiler|nvtx-|record-|memory-snapshot|nccl-|use-nccl-ub"
    r"|hccl-|tp-comm-|disable-tp-comm|overlap-(grad|param)|align-|delay-(grad|param)|ddp-|batch-p2p|flight-recorder-"
    r"|disable-flight-recorder|(use|masked|bias|rope|gradient|cross)-?[a-z-]*fus(ion|ed)|use-fused-|dist-ckpt-|ckpt-fully"
    r"|ckpt-assume|use-persistent-ckpt|async-save|inprocess-|inference-|enable-gloo|disable-gloo|use-sharp|sharp-"
    r"|create-all-gather|distributed-backend|distributed-timeout|manual-gc|mmap-|data-cache-path|num-workers"
    r"|(load|save)-rng|moe-permute-fusion|moe-router-fusion|moe-grouped-gemm|use-mcore-models|use-cpu-initialization"
    r")"
)
"""Flags of Megatron-LM's internals, which change neither training nor saved files."""

SAMPLES = {
    "--train-samples": "--train-iters",
    "--lr-decay-samples": "--lr-decay-iters",
    "--lr-warmup-samples": "--lr-warmup-iters",
}
"""Flags in samples, by the equivalent flags in steps."""


class Pasted(NamedTuple):
    """The words of a command, sorted by use."""

    words: list[str]
    """Words that the command itself knows, and unknown words."""
    aside: list[str]
    """Flags of Megatron-LM's internals."""
    turned: list[str]
    """Flags in samples that were converted to steps: each flag with its value, and its replacement."""


class PastedCommand(Command):
    """A training command: it ignores only flags of Megatron-LM's internals."""

    turns_samples = True

    def sets_aside(self, flag: KnownFlag) -> bool:
        """Return whether the command may ignore a flag, as no result depends on the flag."""
        return flag.role in ("harmless", "unpriced") and bool(re.match(INTERNAL, flag.name))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print a note on ignored flags, and parse the rest as usual."""
        if not ctx.resilient_parsing:
            following = {
                name: 0 if getattr(param, "is_flag", False) else param.nargs
                for param in self.get_params(ctx)
                if param.param_type_name == "option"
                for name in (*param.opts, *param.secondary_opts)
            }
            sorted_words = sort_words(args, following, self.sets_aside, self.turns_samples)
            args = sorted_words.words
            _say(sorted_words, ctx.command_path)
        return super().parse_args(ctx, args)


class PlanningCommand(PastedCommand):
    """A planning command: it also ignores flags that only affect learning."""

    turns_samples = False

    def sets_aside(self, flag: KnownFlag) -> bool:
        """Return whether a flag affects neither time nor memory, for flags of frameworks whose commands are
        pasted."""
        return flag.role in ("harmless", "training") and flag.framework in ("megatron", "mindspeed")


def _say(found: Pasted, command: str) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    if found.turned:
        print(f"{command}: {'; '.join(found.turned)}", file=sys.stderr)
    if found.aside:
        names = ", ".join(dict.fromkeys(found.aside))
        print(f"{command}: ignored, as they have no effect here: {names}", file=sys.stderr)


def sort_words(
    words: Sequence[str],
    following: Mapping[str, int],
    sets_aside: Callable[[KnownFlag], bool],
    turns_samples: bool = True,
) -> Pasted:
    """The words of a command, without flags of Megatron-LM and MindSpeed that it may ignore.

    Args:
        following: number of words that follow each flag of the command.
        sets_aside: test of whether the command may ignore a flag that it lacks.
        turns_samples: convert `--train-samples` to steps of the given `--global-batch-size`.
    """
    names = {word.partition("=")[0] for word in words}
    if not any(name.startswith("--") and name not in following for name in names):
        return Pasted(list(words), [], [])
    from planner.formats.facts.flag_catalogue import known_flags  # Only pasted commands need it.

    known = known_flags()
    batch = _value(words, "--global-batch-size", "--gbs") if turns_samples else None
    kept: list[str] = []
    aside: list[str] = []
    turned: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        name, equals, value = word.partition("=")
        at += 1
        if word == "--":
            kept += words[at - 1 :]
            break
        if name in following:
            end = at + max(following[name] - bool(equals), 0)
            kept += [word, *words[at:end]]
            at = end
            continue
        flag = known.get(name)
        if flag is None or not name.startswith("--"):
            kept.append(word)
            continue
        end = at if equals else _end(words, at, flag)
        given = value if equals else " ".join(words[at:end])
        steps = _steps(name, given, batch)
        if steps is not None:
            kept += [SAMPLES[name], str(steps)]
            turned.append(f"{name} {given} is {SAMPLES[name]} {steps} of {batch} sequences")
        elif sets_aside(flag):
            aside.append(name)
        else:
            kept += [word, *words[at:end]]
        at = end
    return Pasted(kept, aside, turned)


def _end(words: Sequence[str], at: int, flag: KnownFlag) -> int:
    """Index after the values of a flag whose name is before `at`."""
    most = {"": 0, "1": 1}.get(flag.words, len(words))
    end = at
    while end < len(words) and end - at < most and not words[end].startswith("--"):
        end += 1
    return end


def _value(words: Sequence[str], *names: str) -> int | None:
    """The whole number that one of these flags gives."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        text = value if equals else words[at + 1] if at + 1 < len(words) else ""
        if name in names and text.isascii() and text.isdigit() and len(text) < 10 and int(text):
            return int(text)
    return None


def _steps(name: str, given: str, batch: int | None) -> int | None:
    if name not in SAMPLES or batch is None or not (given.isascii() and given.isdigit() and len(given) < 16):
        return None
    return -(-int(given) // batch) if name != "--train-samples" else int(given) // batch or None
