"""Expert parallelism: the experts of one stage spread over ranks, and dispatch of tokens.

Each of `ep` ranks has whole experts; tokens are sent to them by all-to-all (GShard, arXiv:2006.16668, section
3.2). Expert tensor parallelism splits every expert over `etp` ranks, like an MLP (Megatron-LM,
arXiv:1909.08053, section 3). Every rank of a stage routes different tokens, so neither depends on tensor
parallelism elsewhere. Elements that a rank sends per layer and microbatch, for T tokens of its own and even
load; backward sends the same:

    ep    etp   forward
    > 1   1     2 k T D (ep - 1) / ep: tokens to experts, and results back
    > 1   > 1   besides, (etp - 1) of the arrivals, k T D, to each other rank of an expert: 2 (etp - 1) k T D
    1     > 1   2 (etp - 1) T D: tokens before they are sorted, and summed results back
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from costmodels import Layout
from runtime.model.experts import Experts, MixtureOfExperts, Router
from runtime.model.routing import (
    Assignment,
    LocalDispatch,
    assign,
    capacity,
    capacity_mask,
    combine,
    permute,
    spread,
)
from runtime.model.transformer import Transformer
from runtime.parallel.collectives import Exchange, all_gather, all_to_all, gather, reduce_scatter
from runtime.parallel.mesh import Grid
from runtime.parallel.tensor import local_weight
from runtime.parallel.zigzag import rank_order, sequence_order

SPLIT_DIMENSIONS = {"up": 1, "gate": 1, "down": 2, "up_bias": 1, "gate_bias": 1}
"""Dimension of each expert parameter that has the expert's inner width F."""


def expert_parallel(stage: Transformer, layout: Layout, grid: Grid) -> None:
    """Split the experts of `stage` by `layout`, and set the dispatch of tokens."""
    for block in stage.blocks:
        if isinstance(block.mlp, MixtureOfExperts):
            _choose_over_sequences(block.mlp.router, layout, grid)
            if layout.expert_parallel * layout.expert_tensor_parallel > 1:
                _split_experts(block.mlp, layout, grid)


def _split_experts(mixture: MixtureOfExperts, layout: Layout, grid: Grid) -> None:
    assert grid.expert_mesh is not None
    ep, etp = layout.expert_parallel, layout.expert_tensor_parallel
    experts, local = mixture.experts, mixture.dispatch
    assert isinstance(local, LocalDispatch)
    _distribute(experts, layout, grid)
    first = etp == 1 or grid.expert_mesh.get_local_rank("etp") == 0

    def product(name: str, rows: Tensor, counts_E: Tensor, sizes: list[int] | None) -> Tensor:
        weight, bias = (local_weight(getattr(experts, key)) for key in (name, f"{name}_bias"))
        if bias is not None and name == "down" and not first:
            # The ranks of an expert add up their results, and so its bias: it must count once.
            bias = bias * 0.0
        return experts.linear(name, rows, weight, counts_E, bias, sizes)

    experts.product = product  # type: ignore[method-assign]
    experts.width //= etp
    etp_group = grid.expert_mesh.get_group("etp") if etp > 1 else None
    if ep > 1:
        group = grid.expert_mesh.get_group("ep")
        whole = ExchangeDispatch(local.experts, local.drops, group, etp_group)
        mixture.dispatch = HalvedDispatch(whole, experts) if layout.expert_halves else whole
    elif etp_group is not None:
        mixture.dispatch = GatherDispatch(local, etp_group)


def _distribute(experts: Experts, layout: Layout, grid: Grid) -> None:
    assert grid.expert_mesh is not None
    sizes = {"ep": layout.expert_parallel, "etp": layout.expert_tensor_parallel}
    # FSDP2 takes what one or two dimensions split; those of one rank are left out.
    dims = tuple(dim for dim, size in sizes.items() if size > 1)
    mesh = grid.expert_mesh[dims]
    for name, parameter in list(experts.named_parameters(recurse=False)):
        over_width = SPLIT_DIMENSIONS.get(name)
        within: Placement = Replicate() if over_width is None else Shard(over_width)
        placements = [Shard(0) if dim == "ep" else within for dim in dims]
        part = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


class GatherDispatch:
    """Dispatch for ranks with a part of every expert: the tokens of the ranks that share experts are gathered
    before sorting."""

    def __init__(self, local: LocalDispatch, group: dist.ProcessGroup) -> None:
        self.local, self.group = local, group

    def send(self, x_TD: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> Any:
        everyone_Tk = all_gather(chosen_Tk, self.group.group_name, self.group.size())
        return self.local.send(gather(x_TD, 0, self.group), gather(weights_Tk, 0, self.group), everyone_Tk)

    def receive(self, sent: Any) -> tuple[Tensor, Tensor]:
        return self.local.receive(sent)

    def give_back(self, sent: Any, rows_RD: Tensor) -> Tensor:
        return reduce_scatter(self.local.give_back(sent, rows_RD), 0, self.group)


class _Travelling(NamedTuple):
    """The state of a dispatch in progress."""

    started: Tensor
    weights: Tensor
    assignment: Assignment
    exchange: Exchange
    counts: Tensor
    """Rows of each of this rank's experts from all ranks with a part of it, [E / ep]."""
    totals: list[int]
    """Numbers of rows received by each of the etp ranks of the same experts."""
    order: Tensor
    """Places, in the received tensor with equally long parts from each rank, of the rows sorted by expert."""


class ExchangeDispatch:
    """Dispatch for ranks with some of the experts: every row is sent to the rank of its expert."""

    def __init__(
        self, experts: int, drops: bool, group: dist.ProcessGroup, etp_group: dist.ProcessGroup | None
    ) -> None:
        self.experts, self.drops = experts, drops
        self.group, self.etp_group = group, etp_group

    def send(self, x_TD: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> _Travelling:
        return self.ready(x_TD, weights_Tk, chosen_Tk)()

    def ready(self, x_TD: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> Callable[[], _Travelling]:
        """A function that sends tokens, after the ranks of their experts know the numbers of rows."""
        assignment = assign(chosen_Tk, self.experts)
        ranks = self.group.size()
        leaving = assignment.counts.view(ranks, -1)
        arriving = all_to_all(leaving, self.group.group_name, ranks).unsqueeze(0)
        own = 0
        if self.etp_group is not None:
            own = self.etp_group.rank()
            arriving = all_gather(arriving, self.etp_group.group_name, self.etp_group.size())
        leave, arrive, totals = rows_to_move(chosen_Tk, leaving, arriving, own)
        exchange = Exchange(leave, arrive, self.group)
        if self.drops:
            assignment = assignment.without_dropped(sum(exchange.sent))

        def start() -> _Travelling:
            rows_RD = permute(x_TD, assignment.order, chosen_Tk.shape[1], assignment.places)
            started = exchange.start(rows_RD)
            order = _places_by_expert(arriving, totals)
            return _Travelling(started, weights_Tk, assignment, exchange, arriving.sum((0, 1)), totals, order)

        return start

    def receive(self, sent: _Travelling) -> tuple[Tensor, Tensor]:
        rows_RD = sent.exchange.finish(sent.started)
        if self.etp_group is not None:
            missing = max(sent.totals) - rows_RD.shape[0]
            rows_RD = gather(F.pad(rows_RD, (0, 0, 0, missing)) if missing else rows_RD, 0, self.etp_group)
        return permute(rows_RD, sent.order, 1), sent.counts

    def give_back(self, sent: _Travelling, rows_RD: Tensor) -> Tensor:
        exchange, rows_RD = self.way_back(sent, rows_RD)
        rows_RD = exchange.whole(rows_RD)
        return combine(rows_RD, sent.weights, sent.assignment)

    def way_back(self, sent: _Travelling, rows_RD: Tensor) -> tuple[Exchange, Tensor]:
        """Results to be returned to the ranks of their tokens, and the exchange for it."""
        rows_RD = spread(rows_RD, sent.order, len(sent.totals) * max(sent.totals))
        if self.etp_group is not None:
            rows_RD = reduce_scatter(rows_RD, 0, self.etp_group)[: sum(sent.exchange.received)]
        return Exchange(sent.exchange.received, sent.exchange.sent, self.group), rows_RD


class HalvedDispatch:
    """Dispatch in two parts: experts compute one part while the other is sent to them or back.

    Backward does the same in reverse order.
    """

    def __init__(self, whole: ExchangeDispatch, experts: Experts) -> None:
        self.whole, self.experts = whole, experts

    def send(self, x_TD: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> list[_Travelling]:
        halves = zip(*(each.chunk(2) for each in (x_TD, weights_Tk, chosen_Tk)), strict=True)
        # The sizes of both are exchanged before the rows of the first one are in the way.
        return [start() for start in [self.whole.ready(*half) for half in halves]]

    def receive(self, sent: list[_Travelling]) -> tuple[Tensor, Tensor]:
        return self.whole.receive(sent[0])

    def give_back(self, sent: list[_Travelling], rows_RD: Tensor) -> Tensor:
        returning = [self._start_back(sent[0], rows_RD)]
        returning += [self._start_back(half, self.experts(*self.whole.receive(half))) for half in sent[1:]]
        return torch.cat([finish() for finish in returning])

    def _start_back(self, sent: _Travelling, rows_RD: Tensor) -> Callable[[], Tensor]:
        """Send results back, and return a function that waits for the received ones: the weighted sums of one
        part."""
        exchange, leaving_RD = self.whole.way_back(sent, rows_RD)
        started = exchange.start(leaving_RD)

        def finish() -> Tensor:
            # The rows that were sent stay until then, as collectives keep them.
            nonlocal leaving_RD
            rows_RD = exchange.finish(started)
            del leaving_RD
            return combine(rows_RD, sent.weights, sent.assignment)

        return finish


def rows_to_move(
    chosen_Tk: Tensor, leaving: Tensor, arriving: Tensor, own: int
) -> tuple[list[int], list[int], list[int]]:
    """Numbers of rows to each rank, from each rank, and to each of the etp ranks of the same experts.

    This is the only wait for the device, as an exchange of uneven parts needs sizes on the host.

    Args:
        chosen_Tk: experts of this rank's tokens.
        leaving: [ep, E / ep] rows to each expert.
        arriving: [etp, ep, E / ep] rows by receiving rank (of the same experts), source and expert.
        own: number of this rank among the etp ones.
    """
    ranks = len(leaving)
    sizes = torch.cat((leaving.sum(1), arriving[own].sum(1), arriving.sum((1, 2)))).tolist()
    return sizes[:ranks], sizes[ranks : 2 * ranks], sizes[2 * ranks :]


def _places_by_expert(arriving: Tensor, totals: list[int]) -> Tensor:
    """Places of each expert's rows among the rows that arrive.

    Args:
        arriving: [etp, ep, E / ep] rows by receiving rank (of the same experts), source and expert.
        totals: rows received by each of the etp ranks; all parts have the length of the longest.
    """
    device, longest = arriving.device, max(totals)
    experts = torch.arange(arriving.shape[2], device=device).repeat(arriving.shape[1])
    parts = list(zip(arriving, totals, strict=True))
    owners = [experts.repeat_interleave(part.flatten(), output_size=total) for part, total in parts]
    places = [
        torch.arange(number * longest, number * longest + total, device=device)
        for number, (_, total) in enumerate(parts)
    ]
    return torch.cat(places)[torch.cat(owners).argsort(stable=True)]


def _choose_over_sequences(router: Router, layout: Layout, grid: Grid) -> None:
    """Compute a limited capacity over whole sequences whose tokens are on several ranks."""
    group = grid.sequence_group
    if not router.options.capacity_factor or group is None:
        return
    experts = router.weight.shape[0]
    dealt = 1 if layout.context_parallel_form == "all_to_all" else layout.context_parallel

    def kept(weights_BSk: Tensor, chosen_BSk: Tensor) -> Tensor:
        weights_BSk, chosen_BSk = (
            sequence_order(gather(part, 1, group), dealt, 1) for part in (weights_BSk, chosen_BSk)
        )
        limit = capacity(weights_BSk.shape[1], router.top_k, experts, router.options.capacity_factor)
        mask_BSk = rank_order(capacity_mask(weights_BSk, chosen_BSk, experts, limit), dealt, 1)
        return mask_BSk.chunk(group.size(), dim=1)[group.rank()]

    router.capacity_mask = kept  # type: ignore[method-assign]
