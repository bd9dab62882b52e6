"""The range in which a measured step may lie around its estimate.

Errors of estimates are factors, so a range is step time / e^spread to step time x e^spread. It holds 80 % of
the measured steps that were not used in the calibration. These effects widen the range:

- effects beyond one constant for each kernel (`base`), mostly with small matrices (`narrow`);
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
"""Hidden size for which `Spread.narrow` is given.

Measured times of layers of one shape differ from the formulas by 7 to 9 % for hidden sizes of 1024 and 2048,
and by 4 % for 6144 (catalogue/calibrated.yaml, measured layers of vTrain's runs).
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

    Independent errors are combined as root-sum-square: `base` and `narrow` apply to the whole step, `network`
    to the share of communication for each doubling of nodes, `launch` to the share of the launch floor,
    `bubble` to the share of the bubble. For measured layers, `measured` replaces these.

    Args:
        engine: engine with its constants for the device.
        time: seconds of each part of `StepTime`, arrays of shape [n].
        step_time: their sum.
        known: `layer_table.known_share` of the rows, 0 to 1.
        hidden: hidden size of the model.
        experts: True if the model has experts.
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
    """Half the width of the range from each cause alone, by its name in `Spread`, [n] each.

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
