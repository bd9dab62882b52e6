"""The notation of layouts, such as `tp=4+sp pp=8 mbs=1 x 4`: reading the degrees in such a text."""

from __future__ import annotations

import re
from collections.abc import Iterator

SWITCHES = ("expert_halves", "cuda_graphs", "fp8_param_gather")
"""Degrees that are printed as a single word when they are true."""

_MORE = re.compile(rf"[\s,]+(?=[A-Za-z_-]+=|(?:{'|'.join(SWITCHES)})\b)")
"""Pattern of the separator between two degrees: blanks or commas before a name."""

_MICRO_BATCHES = re.compile(r"\bmbs=[0-9]+ x ([0-9]+)\b")


def degrees_in(text: str) -> Iterator[str]:
    """The degrees in a text, each as `name=value`; other words are returned unchanged.

    Examples:
        >>> list(degrees_in("tp=4+sp pp=8 mbs=1 x 4 recompute=full/block:2"))[:4]
        ['tp=4', 'sp=true', 'pp=8', 'mbs=1']
        >>> list(degrees_in("pp=4 layers=9*2+8+6"))
        ['pp=4', 'layers_per_stage=9,9,8,6']
    """
    for word in _MORE.split(text.strip()):
        yield from _spelled(word)


def micro_batches_in(text: str) -> int | None:
    """The microbatches of a step that a text names (`mbs=1 x 4`: 4); None where it names none."""
    found = _MICRO_BATCHES.search(text)
    return None if found is None else int(found[1])


def _spelled(word: str) -> Iterator[str]:
    """The degrees in one word."""
    name, _, value = word.partition("=")
    if name == "tp" and value.endswith("+sp"):
        yield from (f"tp={value.removesuffix('+sp')}", "sp=true")
    elif name == "mbs":
        # The number of microbatches follows from the batch.
        yield f"mbs={re.sub(r' x [0-9]+$', '', value)}"
    elif name == "offload":
        yield from (f"offload_{what}=true" for what in value.split("+"))
    elif name == "layers":
        yield f"layers_per_stage={','.join(_every_stage(value))}"
    elif name == "recompute" and (parts := re.fullmatch(r"(\w+)(?:\((.+)\))?(?:/(\w+):(\d+))?", value)):
        kind, modules, method, layers = parts.groups()
        yield f"recompute={kind}"
        if modules:
            yield f"recompute_modules={modules.replace('+', ',')}"
        if method:
            yield from (f"recompute_method={method}", f"recompute_num_layers={layers}")
    else:
        yield f"{word}=true" if word in SWITCHES else word


def _every_stage(text: str) -> Iterator[str]:
    """The layers of each stage from a sum such as `9*2+5`, where `9*2` are two stages; other texts are
    returned unchanged."""
    for part in re.split(r"[+,]", text):
        run = re.fullmatch(r"\s*([0-9]+)\s*\*\s*([1-9][0-9]{0,3})\s*", part)
        yield from [run[1]] * int(run[2]) if run else [part]
