"""Buffers of the libraries that exchange the tokens of experts, outside of PyTorch's allocator.

Sizes of DeepEP's buffers follow from its tables of chunks (csrc/legacy/config.hpp and
deep_ep/buffers/legacy.py at commit dd758caf), with two bytes for each element (Megatron-LM,
moe/fused_a2a.py). HybridEP's buffers hold the tokens of all ranks that it reaches through memory, once for
each direction.
"""

from __future__ import annotations

import numpy as np

from costmodels.layers.shapes import element_bytes, tokens
from costmodels.spec.engine import Engine
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable

PEERS = 8
"""Number of ranks of a node in DeepEP."""

CHANNELS = 10
"""Number of channels: half of the 20 multiprocessors that DeepEP uses by default."""

CHUNK_TOKENS = ((8, 256), (64, 288), (96, 480), (128, 560), (160, 720))
"""Tokens that a channel receives from each peer of its node, by the largest number of ranks."""

NODE_CHUNK_TOKENS = 128
"""Tokens that a channel receives from each other node."""

TOKEN_FIELDS = 8 + 128 * (8 + 4 + 4)
"""Bytes sent with a token: its origin, and room for 128 experts, their weights and 128 scales."""


def dispatch_buffer_bytes(model: ModelSpec, engine: Engine, table: LayoutTable) -> Floats:
    """Bytes of the dispatch buffers on each device, [n]."""
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
