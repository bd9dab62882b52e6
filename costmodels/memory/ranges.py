"""The relative error of closed forms for the tensors of a step, by the kind of layout.

`python -m benchmarks.closed_memory` fits the shares to dry runs. A layout of several kinds has the widest of
their ranges.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.spec.constants import MemoryRangeConstants
from costmodels.spec.engine import Engine
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import BLOCK, FULL, OPTIMIZERS, RING, Bools, Floats, LayoutTable

KINDS = tuple(MemoryRangeConstants.model_fields)
"""Kinds of layouts and of models, the usual one first."""

EXACT_OPTIMIZERS = tuple(OPTIMIZERS.index(name) for name in ("adam", "sgd", "muon"))
"""Optimizers whose states have the shape of all or some of the weights."""


def kinds_of_model(model: ModelSpec) -> dict[str, bool]:
    """True or False for each kind of models, by the name of the kind."""
    attention = set(model.attention_pattern)
    return {
        "further_tokens": model.mtp_depths > 0,
        "linear": "linear" in attention,
        "capped": model.attention_softcap > 0,
        "windows": "window" in attention,
        "capacity": model.router.capacity_factor > 0,
        "adapters": model.lora is not None,
    }


def kinds_of_rows(table: LayoutTable, experts: bool) -> dict[str, Bools]:
    """The rows of each kind of layouts, [n].

    Args:
        experts: True if the model has experts.
    """
    every = np.ones(len(table), dtype=np.bool_)
    return {
        "usual": every,
        "experts": every & experts,
        "ring": (table.context_parallel > 1) & (table.context_parallel_form == RING),
        "split_backward": table.runs(*SPLIT_BACKWARD),
        "zbv": table.runs("zbv"),
        "full_recompute": table.recompute == FULL,
        "unusual_recompute": _unusual_recompute(table),
        "formats": every & (table.precision not in ("bf16", "fp16")),
        "optimizers": ~np.logical_or.reduce([table.optimizer == exact for exact in EXACT_OPTIMIZERS]),
        "offload": table.offload_activations | table.offload_optimizer,
        "graphs": table.cuda_graphs,
    }


def _unusual_recompute(table: LayoutTable) -> Bools:
    """Rows that repeat several layers from one input, or recompute some layers of a stage but not all."""
    several: Bools = table.recompute_num_layers > 1
    block = table.recompute_method == BLOCK
    # The layers of stages are not always known.
    return np.where(block, table.recompute_num_layers < table.deepest, several) if block.any() else several


def model_share(model: ModelSpec, engine: Engine) -> float:
    """The least half-width of the range for all layouts of a model, as a share of their tensors."""
    return _widest(engine.memory_range, kinds_of_model(model))


def row_share(engine: Engine, table: LayoutTable, experts: bool) -> Floats:
    """Half the width of the range of each row by its layout alone, as a share of its tensors, [n]."""
    share: Floats = np.zeros(len(table))
    for kind, rows in kinds_of_rows(table, experts).items():
        if width := getattr(engine.memory_range, kind):
            share = np.where(rows, np.maximum(share, width), share)
    return share


def _widest(widths: MemoryRangeConstants, kinds: Mapping[str, bool]) -> float:
    return float(max(getattr(widths, kind) * held for kind, held in kinds.items()))
