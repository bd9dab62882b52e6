"""The estimated load of the fullest expert-parallel rank under natural routing, used without a measurement.

The load of an expert over the mean is modelled as a normal variable. Its variance is experts / top_k - 1 over
the number of independent choices, which is far below the number of tokens. A balanced router counts as
`OF_ROUTER` choices. Each sequence of the batch adds `OF_SEQUENCE`, as its subject prefers some experts;
sequences that are routed together average out. The load of a rank is the mean load of its experts. The load
of the fullest rank is the expected maximum of that many normal variables (Blom 1958).
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from costmodels.spec.engine import Engine
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable

OF_ROUTER = {"bias": 10_000.0, "loss": 130.0, "early": 4.0}
"""Number of independent choices of a router.

`loss` and `bias`: the fullest of 64 experts with 6 per token gets 1.52 to 1.72 and 1.04 times the mean
(arXiv:2408.15664, table 2), which is 2.37 standard deviations. `early`: before a router has learned to
balance. Megatron-MoE-ModelZoo and XTuner measured Qwen3-235B-A22B on 8 expert-parallel ranks with natural
routing and with forced balance. Loads of 1.7 to 2.0 times the mean explain the difference of these steps.
"""

OF_SEQUENCE = 31.0
"""Number of independent choices of a sequence.

In texts of one subject, the standard deviation of loads is about the mean for 8 of 256 experts (DeepSeek-V3,
arXiv:2412.19437, figure 9), and a quarter of the mean for 2 of 8 (Mixtral, arXiv:2401.04088, figure 7).
"""


def natural_load(model: ModelSpec, table: LayoutTable) -> Floats:
    """Rows of the fullest expert-parallel rank over the mean, [n]; 1 where one rank has all experts."""
    ranks, router = table.expert_parallel, model.router
    balancing = "early" if router.early else "bias" if router.expert_bias else "loss"
    sharing = table.tensor_parallel * table.context_parallel
    sequences = table.micro_batch_size * ranks * table.expert_tensor_parallel / sharing
    wide = max(model.experts / max(model.top_k, 1) - 1.0, 0.0)
    width = np.sqrt(wide * (1.0 / OF_ROUTER[balancing] + 1.0 / (OF_SEQUENCE * np.maximum(sequences, 1.0))))
    known = {count: _largest(count) for count in np.unique(ranks).tolist()}
    largest = np.array([known[count] for count in ranks.tolist()])
    result: Floats = 1.0 + width / np.sqrt(np.maximum(model.experts, 1) / ranks) * largest
    return result


def load_of_layout(model: ModelSpec, engine: Engine, layout: Layout) -> float:
    """The load of the fullest expert-parallel rank that the price of a layout assumes; 1 for one rank."""
    if not model.experts or layout.expert_parallel == 1:
        return 1.0
    said, given = model.router.load_of(layout.expert_parallel), engine.experts.load
    if said is not None:
        found = said.mean
    elif given is not None:
        found = given
    else:
        found = float(natural_load(model, LayoutTable.of([layout]))[0])
    return min(found, model.router.capacity_factor or found)


def _largest(count: int) -> float:
    """The expected maximum of that many standard normal variables."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
