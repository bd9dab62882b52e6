"""Hooks on the runtime's modules and on PyTorch's FSDP2 and pipeline that tell the tracker the category of
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from runtime.dryrun.tracker import Tracker, inner_tensors
from runtime.model.experts import MixtureOfExperts
from runtime.model.transformer import Transformer
from runtime.optimizers.adam8bit import Adam8bit
from runtime.optimizers.shards import ShardedOptimizer
from runtime.parallel import collectives, layer_chain, loss, offload, recomputation, working_copies
from runtime.parallel.pipeline_stage import LeanStage
from runtime.train import trainer
from runtime.train.executor import Executor

_STATE_OF_STEP = ("optimizer",)


@contextmanager
def roles(tracker: Tracker) -> Iterator[None]:
    """Within this context `tracker` gets the category of the runtime's memory."""
    with ExitStack() as stack:

        def during(owner: Any, name: str, **scope: str) -> None:
            stack.enter_context(patch.object(owner, name, _in_scope(tracker, getattr(owner, name), **scope)))

        def after(owner: Any, name: str, then: Callable[..., None], **scope: str) -> None:
            method = _in_scope(tracker, getattr(owner, name), **scope)
            stack.enter_context(patch.object(owner, name, _followed(method, then)))

        during(trainer, "Balance", category="parameters")
        during(trainer, "ShardedOptimizer", category="optimizer")
        during(loss, "head_loss", category="logits", layer="loss")
        during(loss, "add_product", category="gradients")
        during(working_copies.WorkingCopies, "__init__", category="parameters")
        during(working_copies.WorkingCopies, "hand_over", category="gradients")
        for name in ("_add", "receive", "clear"):
            during(working_copies.GradientSums, name, category="gradients")
        add = _in_scope(tracker, _tagging_gradients(tracker), phase="reduce")
        stack.enter_context(patch.object(working_copies.GradientSums, "add", add))
        stack.enter_context(patch.object(working_copies.GradientSums, "give", _tagging_given(tracker)))
        during(offload._Copy, "fetch", category="activations", layer="attention")
        call = _in_scope(tracker, Transformer.__call__, phase="forward")
        stack.enter_context(patch.object(Transformer, "__call__", call, create=True))
        for name in ("collect_gradients", "squared_norm", "scale", "clip_values"):
            during(ShardedOptimizer, name, phase="reduce")
        during(ShardedOptimizer, "step", phase="optimizer")
        stack.enter_context(patch.object(Adam8bit, "step", _make_moments))

        for name in ("unshard", "wait_for_unshard"):
            during(FSDPParamGroup, name, category="communication")
        after(
            FSDPParamGroup,
            "post_backward",
            partial(_tag_gradients, tracker),
            category="communication",
            phase="reduce",
        )
        after(FSDPParam, "init_unsharded_param", partial(_watch_unsharded, tracker))

        for name in ("get_fwd_recv_ops", "get_bwd_recv_ops"):
            during(LeanStage, name, category="message")
        after(LeanStage, "forward_one_chunk", partial(_tag_sent, tracker))
        after(LeanStage, "backward_one_chunk", partial(_tag_sent_back, tracker))
        after(LeanStage, "backward_weight_one_chunk", partial(_tag_weights, tracker))

        stack.enter_context(patch.object(saved_tensors_hooks, "__enter__", _entering(tracker)))
        stack.enter_context(patch.object(layer_chain._Chain, "forward", _keeping(tracker)))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", _resizing(tracker)))
        stack.enter_context(patch.object(recomputation, "_Call", _labelled_call(tracker)))
        stack.enter_context(saved_tensors_hooks(_keep, _same))
        # Waiting for a collective makes nothing new; the fake operation would.
        stack.enter_context(patch.object(collectives, "_wait", _same))
        stack.enter_context(patch.object(functional, "wait_tensor", _same))
        # DTensor asks for the shape of a result by tensors of the whole size, which only exist as fakes.
        for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
            if hasattr(ShardingPropagator, name):
                paused = _paused(tracker, getattr(ShardingPropagator, name))
                stack.enter_context(patch.object(ShardingPropagator, name, paused))
        yield


def _same(x: Tensor) -> Tensor:
    return x


def _paused(tracker: Tracker, method: Any) -> Any:
    @wraps(method)
    def paused(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracker.pauses += 1
        try:
            return method(self, *args, **kwargs)
        finally:
            tracker.pauses -= 1

    return paused


def _make_moments(rule: Adam8bit, learning_rate: float, weight_decay: float) -> None:
    """Allocate the moments of torchao's optimizer; its compiled update needs nothing else."""
    for owned in rule.owned:
        rule._moments(owned)


def _keep(tensor: Tensor) -> Tensor:
    # Detached: a node that saves its own output would otherwise own itself, and never be freed.
    return tensor if tensor.grad_fn is None else tensor.detach()


def _in_scope(tracker: Tracker, function: Any, **scope: str) -> Any:
    @wraps(function, updated=())
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with tracker.scope(**scope):
            return function(*args, **kwargs)

    return scoped


def _followed(method: Any, then: Callable[..., None]) -> Any:
    @wraps(method)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        then(self, result, *args)
        return result

    return followed


def _entering(tracker: Tracker) -> Any:
    """An `__enter__` of saved-tensor hooks that marks the kept tensors as activations."""

    def enter(self: Any) -> None:
        pack = self.pack_hook

        def packing(tensor: Tensor) -> Any:
            try:
                kept = pack(tensor)
            except recomputation._Enough:
                tracker.tag(tensor, "activations")
                raise
            if kept is None or isinstance(kept, Tensor):
                tracker.tag(tensor, "activations")
            return kept

        torch._C._autograd._push_saved_tensors_default_hooks(packing, self.unpack_hook)

    return enter


def _keeping(tracker: Tracker) -> Any:
    """A `forward` of a chain of layers that marks the kept tensors as activations."""
    forward = layer_chain._Chain.forward

    def keeping(ctx: Any, *args: Any) -> Tensor:
        result = forward(ctx, *args)
        for saved in ctx.saved:
            for tensor in saved:
                tracker.tag(tensor, "activations")
        return result

    return staticmethod(keeping)


def _resizing(tracker: Tracker) -> Any:
    resize = torch.UntypedStorage.resize_

    def resized(self: Any, size: int) -> Any:
        before = self.nbytes()
        result = resize(self, size)
        tracker.resized(self, before)
        return result

    return resized


def _labelled_call(tracker: Tracker) -> type:
    """Calls that are repeated in backward, labelled with their layer in forward."""

    class Labelled(recomputation._Call):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.layer = tracker.layer

        def _run_again(self, with_internals: bool) -> None:
            with tracker.scope(layer=self.layer):
                super()._run_again(with_internals)

    return Labelled


def _tag_gradients(tracker: Tracker, group: Any, _: Any, *args: Any) -> None:
    for parameter in group.fsdp_params:
        tracker.tag(parameter.sharded_param.grad, "gradients")
        # Gradients that are left to the next microbatch.
        tracker.tag(parameter.unsharded_accumulated_grad, "gradients")


def _tagging_gradients(tracker: Tracker) -> Any:
    add = working_copies.GradientSums.add

    def tagging(self: Any) -> None:
        for copy in self.copies:
            tracker.tag(copy.grad, "gradients")
        add(self)
        tracker.end_gradients(self.places)

    return tagging


def _tagging_given(tracker: Tracker) -> Any:
    give = working_copies.GradientSums.give

    def tagging(self: Any, gradients: Sequence[tuple[int, Tensor]]) -> None:
        # Layers that run as a chain: no hook of their parameters sees these gradients. A gradient that
        # autograd would add to one that is there is no gradient by itself.
        for number, gradient in gradients:
            if self.adds or self.copies[number].grad is None:
                tracker.tag(gradient, "gradients")
        give(self, gradients)
        tracker.end_gradients(self.places)

    return tagging


def _watch_unsharded(tracker: Tracker, parameter: Any, _: Any) -> None:
    watch(tracker, [parameter._unsharded_param])


def _tag_sent(tracker: Tracker, stage: Any, output: Any, *args: Any) -> None:
    if not stage.is_last:
        for part in output if isinstance(output, (tuple, list)) else (output,):
            tracker.tag(part, "message")


def _tag_weights(tracker: Tracker, stage: Any, *args: Any) -> None:
    # Gradients of a split backward: no hook of the parameters sees these.
    for parameter in stage.submod.parameters():
        tracker.tag(parameter.grad, "gradients")


def _tag_sent_back(tracker: Tracker, stage: Any, _: Any, number: int, *args: Any, **kwargs: Any) -> None:
    for part in stage.bwd_cache.get(number, ()):
        if isinstance(part, Tensor):
            tracker.tag(part, "message")


def watch(tracker: Tracker, parameters: Iterable[nn.Parameter]) -> None:
    """Report the gradients of `parameters` to `tracker`."""

    def tag(parameter: Tensor) -> None:
        tracker.tag(parameter.grad, "gradients")

    for parameter in parameters:
        if parameter.requires_grad and not getattr(parameter, "_is_watched", False):
            parameter._is_watched = True  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(tag)  # type: ignore[no-untyped-call]


def tag_state(tracker: Tracker, executor: Executor) -> None:
    """Report the tensors of a finished build to `tracker`, and watch the layers."""
    for copies in executor.copies:
        watch(tracker, copies.copies.values())
    for stage in executor.stages:
        for tensor in (*stage.parameters(), *stage.buffers(), *_tables(stage)):
            tracker.tag(tensor, "parameters")
        for module in stage.modules():
            state = getattr(module, "_get_fsdp_state", None)
            if state is None:
                continue
            for group in _groups(state()):
                for parameter in group.fsdp_params:
                    tracker.tag(parameter._sharded_param_data, "parameters")
        watch(tracker, stage.parameters())


def _groups(state: Any) -> list[Any]:
    """The parameter groups of a wrapped module, whose names differ between versions of PyTorch."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return list(groups)


def _tables(stage: Transformer) -> Iterator[Tensor]:
    if stage.embedding is not None and stage.embedding.at is not None:
        yield stage.embedding.at
    for block in stage.blocks:
        yield from block.attention.tables or ()


def label_layers(tracker: Tracker, executor: Executor, compiled: bool, in_two: bool = False) -> None:
    """Label the layers of `executor` while they run.

    Compiled functions report themselves; `in_two`: the core of attention is outside of them.
    """
    for stage in executor.stages:
        outer = {"embedding": stage.embedding, "norm": stage.norm}
        for kind, module in outer.items():
            if module is not None:
                _label(tracker, module, kind)
        for block in stage.blocks:
            if compiled:
                if in_two:
                    _label(tracker, block.attention.core, "attention")
                continue
            _label(tracker, block, "residual")
            for norm in block.norms:
                _label(tracker, norm, "norm")
            _label(tracker, block.attention, "attention")
            is_routed = isinstance(block.mlp, MixtureOfExperts)
            _label(tracker, block.mlp, "experts" if is_routed else "mlp")


def _label(tracker: Tracker, module: nn.Module, kind: str) -> None:
    module.forward = _in_scope(tracker, module.forward, layer=kind)  # type: ignore[method-assign]


def tag_optimizer_state(tracker: Tracker) -> None:
    """Mark the tensors that the optimizer made and kept in a step as its state."""
    for number, _ in tracker.alive.values():
        if number >= 0:
            block = tracker.blocks[number]
            if block.phase in _STATE_OF_STEP and block.category == "temporaries":
                block.category = "optimizer"


__all__ = ["inner_tensors", "label_layers", "roles", "tag_optimizer_state", "tag_state", "watch"]
