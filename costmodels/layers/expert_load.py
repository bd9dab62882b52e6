"""The load of the fullest expert-parallel rank under natural routing, where nobody measured it.

The load of an expert over the mean is taken as a normal number. Its variance is experts / top_k - 1 over the
number of independent choices, which is far below the number of tokens. A balanced router is worth `OF_ROUTER`
choices. Each sequence of the batch is worth `OF_SEQUENCE` more, as its subject prefers some experts;
sequences that are routed together average out. A rank has the mean load of its experts. The fullest of
several ranks has the expected largest of as many normal numbers (Blom 1958).
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from costmodels.spec.engine import Engine
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable

OF_ROUTER = {"bias": 10_000.0, "loss": 130.0, "early": 4.0}
"""Choices that a router is worth.

`loss` and `bias`: the fullest of 64 experts, of which a token has 6, takes in 1.52 to 1.72 and 1.04 times
the mean (arXiv:2408.15664, table 2), which is 2.37 deviations. `early`: while a router has not learned to
balance. The steps of Qwen3-235B-A22B on 8 expert-parallel ranks that Megatron-MoE-ModelZoo and XTuner
measured with natural routing beside forced balance took so much longer that loads of 1.7 to 2.0 times the
mean explain it.
"""

OF_SEQUENCE = 31.0
"""Choices that a sequence is worth.

Loads in texts of one subject spread around the mean by about as much as it is for 8 of 256 experts
(DeepSeek-V3, arXiv:2412.19437, figure 9), and by a quarter of it for 2 of 8 (Mixtral, arXiv:2401.04088,
figure 7).
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
    """The load of the fullest expert-parallel rank that the price of a layout rests on; 1 for one rank."""
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
    """The expected largest of so many standard normal numbers."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
