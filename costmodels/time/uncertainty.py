"""The range in which a measured step may lie around its estimate.

Estimates miss by a factor, so a range is step time / e^spread to step time x e^spread. It holds 80 % of the
measured steps that the calibration did not see. These widen it:

- effects that one constant a kernel leaves out (`base`), most of all of small matrices (`narrow`);
- the real state of the network, which beyond a few nodes differs between jobs by more than any layout does;
- the host's launch floor;
- the bubble.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.table import Floats

COMMUNICATION = (
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "data_parallel",
)
"""Parts of `StepTime` that wait for links."""

NARROW_HIDDEN = 1024
"""Hidden size of which `Spread.narrow` tells the width.

Measured times of layers of one shape lie 7 to 9 % around the formulas for hidden sizes of 1024 and 2048, and
4 % for 6144 (catalogue/calibrated.yaml, measured layers of vTrain's runs).
"""


def spread(
    cluster: Cluster,
    engine: Engine,
    time: Mapping[str, Floats],
    step_time: Floats,
    known: Floats | float = 0.0,
    hidden: float = np.inf,
    experts: bool = False,
) -> Floats:
    """Half the width of the 80 % range as a natural logarithm, [n].

    Independent errors add in squares: `base` and `narrow` of the whole, `network` of the share of
    communication for each doubling of nodes, `launch` of the share of the launch floor, `bubble` of its own.
    Measured layers leave `measured` instead, as far as they are known.

    Args:
        engine: engine with its constants for the device.
        time: seconds of each part of `StepTime`, arrays of shape [n].
        step_time: their sum.
        known: `layer_table.known_share` of the rows, 0 to 1.
        hidden: hidden size of the model.
        experts: the model has some.
    """
    parts = causes(cluster, engine, time, step_time, hidden, experts)
    formulas = np.sqrt(sum((part**2 for part in parts.values()), np.zeros_like(step_time)))
    result: Floats = formulas + (engine.spread.measured - formulas) * known
    return result


def causes(
    cluster: Cluster,
    engine: Engine,
    time: Mapping[str, Floats],
    step_time: Floats,
    hidden: float = np.inf,
    experts: bool = False,
) -> dict[str, Floats]:
    """Half the width of the range that each cause gives alone, by its name in `Spread`, [n] each.

    The arguments are those of `spread`.
    """
    width = engine.spread
    base = width.experts if experts and width.experts is not None else width.base
    waits = sum((time[part] for part in COMMUNICATION), np.zeros_like(step_time)) / step_time
    everywhere = np.ones_like(step_time)
    return {
        "base": base * everywhere,
        "narrow": width.narrow * NARROW_HIDDEN / hidden * everywhere,
        # A node's own links are as the data sheet says; each doubling of nodes adds switches and other jobs.
        "network": width.network * waits * (1.0 + np.log2(cluster.nodes)),
        "launch": width.launch * time["launch"] / step_time,
        "bubble": width.bubble * time["bubble"] / step_time,
    }
