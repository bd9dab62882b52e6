"""Buffers of the libraries that exchange the tokens of experts, outside of PyTorch's allocator.

DeepEP's are as large as its tables of chunks say (csrc/legacy/config.hpp and deep_ep/buffers/legacy.py at
commit dd758caf), for two bytes an element (Megatron-LM, moe/fused_a2a.py). HybridEP's hold the tokens of all
ranks that it reaches through memory, once on their way to experts and once on their way back.
"""

from __future__ import annotations

import numpy as np

from costmodels.layers.shapes import element_bytes, tokens
from costmodels.spec.engine import Engine
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable

PEERS = 8
"""Ranks of a node for DeepEP."""

CHANNELS = 10
"""Half of the multiprocessors that DeepEP takes unless it is told: 20."""

CHUNK_TOKENS = ((8, 256), (64, 288), (96, 480), (128, 560), (160, 720))
"""Ranks up to which a channel takes in so many tokens of each peer of its node."""

NODE_CHUNK_TOKENS = 128
"""Tokens that a channel takes in of each other node."""

TOKEN_FIELDS = 8 + 128 * (8 + 4 + 4)
"""Bytes beside a token: where it comes from, and room for 128 experts, their weights and 128 scales."""


def dispatch_buffer_bytes(model: ModelSpec, engine: Engine, table: LayoutTable) -> Floats:
    """Bytes of these buffers on each device, [n]."""
    found = np.zeros(len(table))
    kind, ranks = engine.experts.buffers, table.expert_parallel
    if not model.experts or not kind or model.router.capacity_factor:
        return found
    if kind == "hybridep":
        own = element_bytes(table.precision) * tokens(model, table) * model.hidden / table.tensor_parallel
        found = 2 * own * np.minimum(ranks, engine.experts.reach)
    else:
        each = 2 * model.hidden + TOKEN_FIELDS
        chunk = np.select(
            [ranks <= limit for limit, _ in CHUNK_TOKENS], [size for _, size in CHUNK_TOKENS], 720
        )
        found = CHANNELS * np.minimum(ranks, PEERS) * chunk * each
        nodes = np.where(ranks > PEERS, ranks / PEERS, 0)
        found = found + CHANNELS * nodes * NODE_CHUNK_TOKENS * (each + 16) * 2
    result: Floats = np.where(ranks > 1, found, 0.0)
    return result
