"""Bytes of the host's memory that offloading takes."""

from __future__ import annotations

from functools import partial

import numpy as np

from costmodels.layers.optimizer import ADAM_STATE, layer_state
from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.states import MASTER
from costmodels.memory.unit_sizes import rank_parameters, row_unit_sizes
from costmodels.ranks.rank_layers import critical_ranks, in_flight
from costmodels.ranks.reductions import row_maximum
from costmodels.spec.engine import Engine
from costmodels.spec.model import ModelSpec
from costmodels.spec.row_blocks import block_results
from costmodels.spec.table import Floats, LayoutTable


def host_bytes(model: ModelSpec, engine: Engine, table: LayoutTable) -> Floats:
    """Bytes that one device keeps in its host's memory, on the fullest pipeline rank of each row, [n].

    An offloaded optimizer keeps master weights and state there; under FSDP2 (`CPUOffloadPolicy`) also the
    fp32 shards of parameters and gradients. Offloaded activations are those of all microbatches in flight.

    Raises:
        InputError: the engine does not know the precision of the table.
    """
    return np.concatenate([*block_results(partial(_host_bytes, model, engine), table)])


def _host_bytes(model: ModelSpec, engine: Engine, table: LayoutTable) -> Floats:
    sizes, (ranks, _) = row_unit_sizes(model, engine, *distinct_shapes(table)), critical_ranks(model, table)
    shared, experts = rank_parameters(sizes, ranks)
    policy = engine.memory_policy(table.precision)
    each = policy.optimizer - ADAM_STATE + layer_state(table)
    if engine.sharding.fully_sharded:
        each = 2 * MASTER + layer_state(table)
    held = (each / table.zero_shards)[:, None] * shared + (each / table.expert_shards)[:, None] * experts
    held = np.where(table.offload_optimizer[:, None], held, 0.0)
    for kind, layers in in_flight(ranks, table.micro_batches[:, None].astype(np.float64)).items():
        held = held + layers * getattr(sizes, f"{kind}_offload")[:, None]
    return row_maximum(held)
