"""What FSDP2 and the optimizer hold for the parameters of a group, and the buffers of their exchange."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.bundled.groups import Group
from costmodels.bundled.moments import Bytes
from costmodels.bundled.optimizer_state import state_bytes, sum_bytes, update_bytes
from costmodels.bundled.pytorch import is_before
from costmodels.bundled.replay import COMMUNICATION, GRADIENTS, KINDS, OPTIMIZER, PARAMETERS
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable

MASTER = 4.0
"""Bytes of a parameter, and of its gradient, as the optimizer sees it."""


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of one group of parameters; 0 where a row does not wrap its parameters, unless it says else."""

    kept: Bytes
    """Parameters as the optimizer sees them, whether wrapped or not."""
    state: Bytes
    """Of the optimizer, whether wrapped or not."""
    gathered: Bytes
    """Copies that compute."""
    buffer: Bytes
    """What an all-gather writes to, before it is copied to where it is used."""
    cast: Bytes
    """What it sends, in the number format that travels."""
    direct: Bytes
    """`gathered` where no all-gather is needed: copied one parameter after the other."""
    copying: Bytes
    """What there is besides the latter when most is there."""
    fresh: Bytes
    """Whole gradients of one micro batch alone."""
    converted: Bytes
    """What there is besides the latter when most of both is there, while one becomes the other."""
    accumulated: Bytes
    """Whole gradients of several micro batches."""
    reducing: Bytes
    """What a reduce-scatter reads."""
    written: Bytes
    """What it writes: the gradients, or what becomes them."""
    reduced: Bytes
    """The latter."""
    added: Bytes
    added_cast: Bytes
    """What it writes to be added to gradients that are there, and what changes its number format for that."""
    held: Bytes
    """What an all-reduce keeps of it to the end of backward."""
    last_fresh: Bytes
    last_accumulated: Bytes
    """The last of the gradients, fresh or accumulated, which FSDP2 before PyTorch 2.15 holds until they are
    reduced."""
    stuck: Bytes
    """What an all-reduce keeps of what is added to the gradients of other micro batches."""
    shuffled_fresh: Bytes
    shuffled_accumulated: Bytes
    """What changes when gradients, fresh or accumulated, are copied to the order of the ranks."""
    moving: Bytes
    """Gathered parameters in the order of the ranks that share them."""
    summing_fresh: Bytes
    summing_accumulated: Bytes
    """What there is besides gradients, fresh or accumulated, while tensor-parallel ranks sum the largest of
    these: its sum, and sums instead of those before it."""
    summed_fresh: Bytes
    summed_accumulated: Bytes
    """What changes once all are summed, as a sum is a message."""
    delivered: Bytes
    """Sums besides gradients that FSDP2 does not manage, from the end of backward to that of the step."""
    quotient: Bytes
    """A copy of what is reduced, where nothing is scattered; PyTorch 2.15 makes none."""
    gradients: Bytes
    """This rank's, reduced."""
    sums: Bytes
    """What the optimizer keeps during its step, whether wrapped or not."""
    updating: Bytes
    """What the optimizer makes besides where it makes most, whether wrapped or not."""

    def take(self, rows: Ints) -> GroupBytes:
        """Of some rows."""
        return GroupBytes(**{name: held.take(rows) for name, held in vars(self).items()})


def wraps_parameters(table: LayoutTable, has_experts: bool) -> Bools:
    """Rows whose parameters FSDP2 manages (`runtime.parallel.data.needs_data_parallel`)."""
    narrow = table.precision not in ("fp32", "tf32")
    result: Bools = (table.replicas > 1) | table.offload_optimizer | narrow
    return result | (table.expert_replicas > 1) if has_experts else result


def element_widths(table: LayoutTable) -> tuple[float, float]:
    """Bytes of a parameter that computes, and of a gradient that is reduced."""
    return (
        4.0 if table.precision in ("fp32", "tf32") else 2.0,
        2.0 if table.gradient_reduction == "bf16" else 4.0,
    )


def _converting(group: Group, width: float, reduced: float) -> Floats:
    """Bytes beyond the converted gradients while they are converted one after the other."""
    before, highest = np.zeros_like(group.whole), np.zeros_like(group.whole)
    for elements in group.elements:
        after = before + elements
        highest = np.maximum(highest, reduced * after + width * (group.whole - before))
        before = after
    return highest - reduced * group.whole


def _last(group: Group) -> Floats:
    """Elements of the last parameter, where FSDP2 holds its gradient until all are reduced."""
    return group.last * is_before(2, 15)


def _copied_alone(group: Group, width: float, leaves: Bools) -> Floats:
    """What there is besides the copies of a group when most is there.

    Each comes from the host, if it is there, and is converted (FSDPParam.all_gather_inputs), before there is
    memory for its copy, and what was converted last is there until then (FSDPParamGroup.wait_for_unshard).
    """
    converts = width != MASTER
    sent = width * (converts | leaves)
    missing, last = group.whole, np.zeros_like(group.whole)
    most = np.zeros_like(group.whole)
    for elements in group.elements:
        coming = sent * (last + elements) + MASTER * (converts & leaves) * elements
        most = np.maximum(most, coming - width * missing)
        missing = missing - elements
        most = np.maximum(most, sent * elements - width * missing)
        last = elements
    return most


def _shuffled(width: Floats, group: Group) -> Bytes:
    """Copies instead of all gradients but the last, if that is held."""
    composition = np.zeros((len(KINDS), len(width)))
    composition[COMMUNICATION] = width * group.whole
    composition[GRADIENTS] = -width * (group.whole - _last(group))
    return Bytes.of_shapes(composition, np.arange(len(width)))


def _summing(width: Floats, group: Group) -> Bytes:
    """`GroupBytes.summing_fresh` of gradients of so many bytes each."""
    before = width * group.summed_before
    return _delivered(width * group.largest_summed + before, -before)


def _summed(width: Floats, group: Group) -> Bytes:
    """`GroupBytes.summed_fresh` of the same."""
    sums = width * group.summed
    return _delivered(sums, -sums)


def _delivered(message: Floats, gradients: Floats) -> Bytes:
    """What collectives have made that is a message, or the gradients themselves."""
    composition = np.zeros((len(KINDS), len(message)))
    composition[COMMUNICATION], composition[GRADIENTS] = message, gradients
    return Bytes.of_shapes(composition, np.arange(len(message)))


def converts_gradients(table: LayoutTable) -> bool:
    """Whether gradients of a whole layer change to the number format that they are reduced in.

    PyTorch before 2.15 does so after the layer's backward; later ones one by one (`casts_of_gradients`).
    """
    return is_before(2, 15) and _made_in(table) != table.gradient_reduction


def casts_of_gradients(table: LayoutTable, wraps: Bools) -> Floats:
    """`Structure.casts` of rows (FSDPParamGroup._set_unsharded_grad_dtypes)."""
    width, reduced = element_widths(table)
    casts = not is_before(2, 15) and _made_in(table) != table.gradient_reduction
    result: Floats = wraps * np.float64(casts * reduced / width)
    return result


def _made_in(table: LayoutTable) -> str:
    """The number format in which backward makes gradients."""
    return {"fp32": "fp32", "tf32": "fp32", "fp16": "fp16"}.get(table.precision, "bf16")


def group_bytes(table: LayoutTable, group: Group, wraps: Bools, replicas: Floats) -> GroupBytes:
    """Bytes of a group.

    Args:
        replicas: copies of each shard.
    """
    width, reduced = element_widths(table)
    casts = casts_of_gradients(table, wraps)
    fresh = np.where((casts > 0) & (casts <= 1), reduced, width)
    # DTensor sums in the wider number format.
    fresh_sums = np.where(casts > 1, reduced, fresh)
    on = wraps.astype(np.float64)
    split = on * (group.shards > 1)
    own = np.where(wraps, group.own, group.whole)
    all_reduces = (table.zero_stage == 0) | (replicas > 1)
    # Reduced gradients go to the host, and only what an all-reduce keeps of them is still there.
    leaves = table.offload_optimizer
    here: Floats = np.where(leaves, 0.0, 1.0)
    written = reduced * on * group.own
    becomes = written * here * (reduced == MASTER)
    communication = {
        "gathered": width * on * group.padded,
        "buffer": width * split * group.padded,
        "cast": width * split * group.own * (leaves | (width != MASTER)),
        "direct": width * (on - split) * group.padded,
        "copying": (on - split) * _copied_alone(group, width, leaves),
        "reducing": reduced * on * group.padded,
        "reduced": (reduced + MASTER * leaves) * on * group.own * (reduced != MASTER),
        "added": reduced * on * group.own,
        "added_cast": (reduced + MASTER) * on * group.own * (reduced != MASTER),
        "delivered": width * (1 - on) * group.summed,
        "held": reduced * on * group.own * all_reduces * (leaves | (reduced != MASTER)),
        "stuck": reduced * on * group.own * all_reduces,
        "quotient": reduced * (on - split) * (replicas > 1) * is_before(2, 15) * group.padded,
    }
    return GroupBytes(
        kept=Bytes.of_kind(PARAMETERS, MASTER * here * own),
        state=Bytes.of_kind(OPTIMIZER, here * state_bytes(table, group)),
        sums=sum_bytes(table, group),
        updating=update_bytes(table, group),
        fresh=Bytes.of_kind(GRADIENTS, fresh * group.whole + (fresh_sums - fresh) * group.summed),
        summing_fresh=_summing(fresh_sums * on, group),
        summing_accumulated=_summing(reduced * on, group),
        summed_fresh=_summed(fresh_sums * on, group),
        summed_accumulated=_summed(reduced * on, group),
        converted=Bytes.of_kind(
            GRADIENTS, on * _converting(group, width, reduced) * converts_gradients(table)
        ),
        shuffled_fresh=_shuffled(fresh * split * group.moved, group),
        shuffled_accumulated=_shuffled(reduced * split * group.moved, group),
        moving=Bytes.of_kind(COMMUNICATION, width * split * group.moved * group.padded),
        last_fresh=Bytes.of_kind(GRADIENTS, fresh * split * _last(group)),
        last_accumulated=Bytes.of_kind(GRADIENTS, reduced * split * _last(group)),
        accumulated=Bytes.of_kind(GRADIENTS, np.where(wraps, reduced, width) * group.whole),
        written=_delivered(written - becomes, becomes),
        gradients=Bytes.of_kind(GRADIENTS, MASTER * on * here * group.own),
        **{name: Bytes.of_kind(COMMUNICATION, size) for name, size in communication.items()},
    )
