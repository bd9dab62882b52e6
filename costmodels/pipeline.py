"""What pipeline ranks hold, and how long their schedule takes.

Closed forms of Narayanan et al. (arXiv:2104.04473, section 2.2) with unequal stages.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from costmodels.hardware import Cluster
from costmodels.model_spec import ModelSpec
from costmodels.network import send
from costmodels.operators import element_bytes, tokens
from costmodels.table import Floats, LayoutTable


@dataclass(frozen=True)
class Ranks:
    """Pipeline ranks; arrays of one shape, [pp] for one layout or [n, k] for a table.

    In a table, k covers the ranks that can be slowest or fullest; equal ones share an entry.
    """

    count: Floats
    """Pipeline ranks that the entry stands for; 0 for one that only differs in what is in flight."""
    dense: Floats
    """Layers with a dense MLP, over all chunks."""
    moe: Floats
    """Layers with experts."""
    first: Floats
    """1 with the embedding, else 0."""
    last: Floats
    """1 with head and loss, else 0."""
    dense_in_flight: Floats
    """Dense layers alive at most, times the micro batches each is alive for, with many micro batches."""
    moe_in_flight: Floats

    @property
    def layers(self) -> Floats:
        """Layers of each rank."""
        return self.dense + self.moe


FIELDS = tuple(field.name for field in fields(Ranks))


def _in_flight(rank: int, pipeline: int, chunks: int) -> list[int]:
    """Micro batches that each chunk of a pipeline rank holds when its warm-up ends.

    1F1B: pp - rank (arXiv:2104.04473, section 2.2.1). Interleaved: Megatron-LM's warm-up of
    2 (pp - rank - 1) + (vpp - 1) pp slots and one more, chunks taking turns of pp micro batches.
    """
    if chunks == 1:
        return [pipeline - rank]
    slots = 2 * (pipeline - rank - 1) + (chunks - 1) * pipeline + 1
    rounds, rest = divmod(slots, pipeline * chunks)
    return [rounds * pipeline + min(max(rest - chunk * pipeline, 0), pipeline) for chunk in range(chunks)]


@lru_cache(maxsize=4096)
def all_ranks(split: tuple[int, ...], pipeline: int, leading_dense: int) -> Ranks:
    """Every pipeline rank of a layout, arrays of shape [pp].

    Args:
        split: layers of each stage; stage i runs on rank i mod pp.
        leading_dense: layers at the start of the model that keep a dense MLP.
    """
    chunks = len(split) // pipeline
    sizes = np.array(split).reshape(chunks, pipeline)
    starts = np.concatenate(([0], np.cumsum(split)[:-1])).reshape(chunks, pipeline)
    dense = np.clip(leading_dense - starts, 0, sizes)
    flight = np.array([_in_flight(rank, pipeline, chunks) for rank in range(pipeline)]).T
    rank = np.arange(pipeline)
    columns = {
        "count": np.ones(pipeline),
        "dense": dense.sum(axis=0),
        "moe": (sizes - dense).sum(axis=0),
        "first": rank == 0,
        "last": rank == pipeline - 1,
        "dense_in_flight": (dense * flight).sum(axis=0),
        "moe_in_flight": ((sizes - dense) * flight).sum(axis=0),
    }
    return Ranks(**{name: column.astype(np.float64) for name, column in columns.items()})


@lru_cache(maxsize=4096)
def _deciding(split: tuple[int, ...], pipeline: int, leading_dense: int) -> tuple[tuple[float, ...], ...]:
    """Rows of `Ranks` that can be slowest or fullest: of equal ranks, those that keep the most in flight."""
    every = all_ranks(split, pipeline, leading_dense)
    kinds: dict[tuple[float, ...], list[list[float]]] = {}
    for row in zip(*(getattr(every, name).tolist() for name in FIELDS), strict=True):
        work, flight = row[1:5], row[5:]
        kept = kinds.setdefault(work, [])
        if all(any(f > k for f, k in zip(flight, other[5:], strict=True)) for other in kept):
            kept.append([float(not kept), *row[1:]])
            kept[0][0] += len(kept) > 1
        else:
            kept[0][0] += 1
    return tuple(tuple(row) for kept in kinds.values() for row in kept)


def deciding_ranks(model: ModelSpec, table: LayoutTable) -> Ranks:
    """The ranks that can be slowest or fullest, for every row of a table: arrays of shape [n, k]."""
    leading_dense = model.layers - model.moe_layers
    width = int(table.pipeline_parallel.max(initial=0)) + 1
    keys, code = np.unique(table.split * width + table.pipeline_parallel, return_inverse=True)
    entries = [_deciding(table.splits[key // width], int(key % width), leading_dense) for key in keys]
    most = max(map(len, entries), default=1)
    filled = np.zeros((len(FIELDS), len(entries), most))
    for index, entry in enumerate(entries):
        filled[:, index, : len(entry)] = np.transpose(entry)
    return Ranks(**{name: filled[position][code] for position, name in enumerate(FIELDS)})


def in_flight(ranks: Ranks, micro_batches: Floats) -> tuple[Floats, Floats]:
    """Layers whose activations are alive at the peak: dense and with experts, for given micro batches."""
    return (
        np.minimum(ranks.dense_in_flight, micro_batches * ranks.dense),
        np.minimum(ranks.moe_in_flight, micro_batches * ranks.moe),
    )


def bubble_seconds(rank_seconds: Floats, count: Floats, chunks: Floats) -> Floats:
    """Idle time of the slowest rank of each row: filling and draining all other ranks, one chunk deep.

    (sum of t - max of t) / vpp, which for equal ranks is Narayanan et al.'s (pp - 1) t / vpp.

    Args:
        rank_seconds: [n, k], forward and backward of one micro batch on each rank.
        count: [n, k], ranks that the entry stands for.
        chunks: [n], model chunks on each rank.
    """
    result: Floats = ((rank_seconds * count).sum(axis=1) - rank_seconds.max(axis=1)) / chunks
    return np.maximum(result, 0.0)


def send_seconds(model: ModelSpec, cluster: Cluster, efficiency: float, table: LayoutTable) -> Floats:
    """Seconds of sending activations and their gradients between stages in one step, [n].

    One message each way for each micro batch and chunk, and for each stage that fills the pipeline;
    sequence parallelism sends its part of the sequence only.
    """
    split = np.where(table.sequence_parallel, table.tensor_parallel, 1)
    payload = element_bytes(table.precision) * tokens(model, table) * model.hidden / split
    stride = table.tensor_parallel * table.context_parallel * table.data_parallel
    pipeline = table.pipeline_parallel
    messages = table.micro_batches * table.virtual_pipeline_parallel + pipeline - 1
    return 2.0 * messages * send(cluster, efficiency, payload, pipeline, stride)
