"""A pipeline stage that keeps only tensors that the schedule still needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, stage

from runtime.faults.heartbeat import set_operation
from runtime.parallel.documents import Documents
from runtime.parallel.loss import TokenLoss
from runtime.parallel.working_copies import WorkingCopies

# Any: what the stage is made of differs between the versions of PyTorch that this runs with.
_modules: Any = stage
FREES_BUFFERS = hasattr(_modules._RecvInfo, "allocate_buffer")
"""True for PyTorch versions that free receive buffers themselves (since 2.15)."""


class LeanStage(PipelineStage):
    """PyTorch's stage with receive buffers that live only from the receive to the use.

    Before 2.15, PyTorch allocates a buffer for the input and one for the gradient of every microbatch of a
    step, and keeps them for good. With many microbatches they take more than all other activations. It also
    keeps the outputs of every microbatch of an evaluation, logits included, to its end.
    """

    documents: Documents | None = None
    """The documents for which the stage is prepared in each microbatch, if they matter."""
    loss: TokenLoss | None = None
    """The loss function, which makes the output of the last stage."""
    labels: Sequence[Tensor] = ()
    """Labels of each microbatch of the running step."""
    copies: WorkingCopies | None = None
    """Working copies of the stage's parameters."""

    def _get_init_p2p_neighbors_ops(self) -> Any:
        # At the bottom of a V a rank is its own neighbour, to which gloo has no connection.
        own, base = dist.get_rank(), cast(Any, super())
        return [op for op in base._get_init_p2p_neighbors_ops() if op.peer != own]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_memory(super()._prepare_forward_infra, *args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_memory(super()._prepare_backward_infra, *args, **kwargs)

    def _without_memory(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `prepare` so that its buffers have shapes but no memory."""
        if FREES_BUFFERS:
            return prepare(*args, **kwargs)
        device, self.device = self.device, torch.device("meta")
        try:
            return prepare(*args, **kwargs)
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        if not self.is_first:
            _move(self.args_recv_info[fwd_chunk_id], self.device, self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_last:
            _move(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        set_operation("forward", fwd_chunk_id + 1)
        self._enter(fwd_chunk_id)
        if self.loss is not None:
            self.loss.labels = self.labels[fwd_chunk_id]
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_first:
            _move(self.args_recv_info[fwd_chunk_id], "meta")
        if not self.has_backward and (self.is_last or self._is_local(self.stage_index + 1)):
            self._forget(fwd_chunk_id)
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            self._forget(fwd_chunk_id)
        return operations

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> None:
        set_operation("backward", bwd_chunk_id + 1)
        self._enter(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not self.has_backward:
            return
        if loss is not None:
            # The schedule keeps it to the end of the step, and its graph would keep the stage's input.
            loss.detach_()
        else:
            _move(self.grad_recv_info[bwd_chunk_id], "meta")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = False) -> None:
        self._enter(bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if self.copies is not None:
            self.copies.add_gradients()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        if self.copies is not None:
            self.copies.reduce()

    def _enter(self, micro_batch: int) -> None:
        """Set a microbatch's documents in the layers, also for recomputation in backward."""
        if self.documents is not None:
            self.documents.enter(cast(Any, self.submod), micro_batch)

    def _forget(self, fwd_chunk_id: int) -> None:
        """Free a microbatch's tensors for backward."""
        own = cast(Any, self)
        if FREES_BUFFERS:
            state = own._forward_chunk_states[fwd_chunk_id]
            state.live_outputs[:] = [None] * len(state.live_outputs)
            state.input_values.clear()
        else:
            own.fwd_cache[fwd_chunk_id] = ((), [])

    def _is_local(self, stage: int) -> bool:
        """Return whether this rank also holds `stage`, as at the turn of a V."""
        return self.stage_index_to_group_rank[stage] == self.group_rank


def _move(infos: Iterable[Any], device: torch.device | str, requires_grad: bool = False) -> None:
    """Replace receive buffers by fresh ones on `device`; those on `meta` take no memory."""
    if FREES_BUFFERS:
        return
    for info in infos:
        info.buffer = torch.empty_like(info.buffer, device=device, requires_grad=requires_grad)
