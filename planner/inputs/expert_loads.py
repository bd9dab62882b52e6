"""The imbalance of experts: a number that is given, or the measurement of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodels.errors import InputError
from costmodels.files import MIB, read_text
from costmodels.paths import expanded
from costmodels.spec.model_parts import ExpertLoad

LARGEST_METRICS = 1024 * MIB
"""Most bytes of a metrics file; a line has some 100 KB for 58 layers of 256 experts."""


def expert_loads(text: str, flag: str) -> tuple[ExpertLoad, ...]:
    """The loads that `text` gives: a number of at least 1, or the metrics.jsonl of a run.

    Raises `InputError`, which names `flag`, where it is neither.
    """
    try:
        load = float(text)
    except ValueError:
        return _measured(expanded(text), flag)
    if not 1 <= load < float("inf"):
        raise InputError(
            f"{flag} {text}: expected a number of at least 1, such as 1.2, early, or a metrics.jsonl"
        )
    return (ExpertLoad(ranks=1, mean=load, peak=load),)


def _measured(file: Path, flag: str) -> tuple[ExpertLoad, ...]:
    """Loads measured in the steps of a run, by the number of ranks over which the experts are divided in
    order."""
    try:
        steps = list(_steps(read_text(file, LARGEST_METRICS)))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"{flag} {file}: {reason}; give a number such as 1.2, or a metrics.jsonl") from None
    except (ValueError, TypeError, AttributeError):
        raise InputError(f"{flag} {file}: is no metrics.jsonl of a run") from None
    if not steps or len({shares.shape for shares in steps}) > 1 or not steps[0].size:
        raise InputError(f"{flag} {file}: no step says expert_load; a run of a model with experts does")
    by_layer = np.stack(steps)
    experts = by_layer.shape[-1]
    found = []
    for ranks in range(1, experts + 1):
        if experts % ranks == 0:
            # Never less than the mean but for rounding.
            fullest = np.maximum(by_layer.reshape(*by_layer.shape[:-1], ranks, -1).mean(-1).max(-1), 1.0)
            found.append(ExpertLoad(ranks=ranks, mean=float(fullest.mean()), peak=float(fullest.max())))
    return tuple(found)


def _steps(text: str) -> Iterator[np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    """Tokens of each expert over the mean in the steps of a run, [layers, experts]."""
    for line in text.splitlines():
        loads = json.loads(line).get("expert_load") if line.strip() else None
        if loads:
            yield np.array(list(loads.values()), dtype=np.float64)
