"""Recomputation of activations in backward (arXiv:1604.06174, arXiv:2205.05198).

Dropped tensors are recomputed when backward first needs one of them, and each tensor is freed as soon as it
is used. This is `torch.utils.checkpoint`, with two differences:

- The output of a norm or an activation function, which the matrices after it keep as their input, is dropped
  as well (Megatron-Core's `CheckpointWithoutOutput`, MindSpeed's activation function recomputation).
- A backward that is split in gradients of inputs and of weights (arXiv:2401.10241) computes twice, once for
  each; `checkpoint` computes once for every weight, and keeps what that weight did not use.

Compiled layers use `checkpoint`: there the compiler drops the outputs too. Experts that a compiled layer
leaves out, but for their activation function, do as eager ones.

Bytes that a layer keeps per token, for e bytes an element, hidden size h, and on one rank q elements of
queries, k of keys, f of the MLP, and n heads. A norm keeps s bytes of statistics: 8 for layernorm and 4 for
rmsnorm; on a CPU, where PyTorch has no fused rmsnorm, that is 4 + 4h.

- none: 2 e h of inputs and 2 e h of outputs of norms, e (2q + 2k) + 4n + 2s, and of the MLP 2 e f, with a
  gate 4 e f;
- core_attention: less 4n, the logsumexp of flash attention (the matrix after it keeps its output);
- mlp: less all of the MLP, which keeps its input only;
- norm: less 2 (e h + s);
- activation: less e f, with a gate 2 e f;
- full: e h, the input, and in units of several layers one for each unit.

With experts, each of the rows that come to a rank's experts keeps 2 e h, itself and its result, and the MLP's
bytes for an expert's share of f; the router keeps fp32 scores. "mlp" is then all of the layer's experts, and
computing them again sends tokens again; "activation" is that of routed and shared experts. Latent attention
keeps e times the ranks of its latents besides.

Sequence parallelism divides inputs and statistics of norms by tp, and what the MLP keeps if it is recomputed.
Outputs of norms are kept gathered, and recomputing norms gathers again: one more all-gather in backward for
each norm whose output matrices keep.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from costmodels import Layout
from runtime.model.attention import LatentAttention
from runtime.model.experts import Experts, MixtureOfExperts
from runtime.model.mlp import MLP
from runtime.model.transformer import Block, Transformer

Packed = Tensor | Callable[[], Tensor]
"""The packed form of a tensor in the autograd graph: the tensor, or a function that returns it."""


def recompute(stage: Transformer, layout: Layout) -> None:
    """Wrap the modules that `layout` recomputes, before compilation, so that the compiler includes it."""
    layers = layout.recompute_num_layers
    blocks = recomputed_blocks(stage, layout)
    if layout.recompute == "selective":
        for block in blocks:
            _recompute_modules(block, layout)
    elif recomputes_units(layout) and blocks:
        stack = stage.stack
        units = [stack[start : start + layers] for start in range(0, len(stack), layers)]
        stage.run_layers = partial(_run_units, units)  # type: ignore[method-assign]
        for block in blocks[len(stack) :]:
            _wrap(block)
    else:
        for block in blocks:
            _wrap(block)


def recomputes_units(layout: Layout) -> bool:
    """Return whether several layers are recomputed as a unit."""
    uniform = layout.recompute == "full" and layout.recompute_method == "uniform"
    return uniform and layout.recompute_num_layers > 1


def recomputed_blocks(stage: Transformer, layout: Layout) -> list[Block]:
    """Layers of `stage` with recomputation; layers of MTP modules always have it."""
    if layout.recompute == "none":
        return []
    stack = stage.stack
    further = stage.blocks[len(stack) :]
    return stack[: layout.recompute_num_layers if layout.recompute_method == "block" else None] + further


def unpack(packed: Packed) -> Tensor:
    """The tensor of `packed`."""
    return packed if isinstance(packed, Tensor) else packed()


def memory_of(tensor: Tensor) -> int:
    """A number that identifies a tensor's memory while it lives; also for fake tensors."""
    owner: int = tensor.untyped_storage()._cdata
    return owner


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` is neither a parameter nor a wrapper of other tensors, such as a distributed
    tensor."""
    return not isinstance(tensor, nn.Parameter) and not is_traceable_wrapper_subclass(tensor)


def pack(tensor: Tensor) -> Packed:
    """`tensor`, or a function that makes it again if it is a view of a recomputed output."""
    if is_plain(tensor):
        for reference, call in _outputs[-1] if _outputs else ():
            output = reference()
            if output is not None and _is_view(tensor, output):
                return call.pack_output(tensor)
    # Detached: a node that saves its own output would otherwise own itself, and never be freed.
    return tensor.detach()


def _recompute_modules(block: Block, layout: Layout) -> None:
    modules = layout.recompute_modules
    if "core_attention" in modules:
        _wrap(block.attention.core)
    with_output: list[nn.Module] = []
    if "norm" in modules:
        with_output += _norms_and_gathers(block, layout)
    if "mlp" in modules:
        _wrap(block.mlp)
    elif "activation" in modules:
        with_output += [network.activation for network in _networks(block)]
    for module in with_output:
        _wrap(module, drop_output=True)
    if with_output:
        _drop_outputs(block)
        if isinstance(block.mlp, MixtureOfExperts):
            # Compilers leave those experts out whose rows they cannot know.
            _drop_outputs(block.mlp)


def _norms_and_gathers(block: Block, layout: Layout) -> list[nn.Module]:
    """The modules whose outputs are dropped where the norms of a layer are recomputed.

    With sequence parallelism, matrices keep the output of a norm gathered from all ranks. So gathering is
    computed again too, together with the norm before it.
    """
    found: list[nn.Module] = []
    again, gathers = "mlp" in layout.recompute_modules, layout.sequence_parallel
    for norm, network in ((block.attention_norm, block.attention), (block.mlp_norm, block.mlp)):
        if norm is None:
            continue
        if again and isinstance(network, MLP):
            _normalise_within(network, norm)
        elif gathers and not isinstance(network, (LatentAttention, MixtureOfExperts)):
            entry = network.get_submodule("entry")
            _normalise_within(entry, norm)
            found.append(entry)
        else:
            found.append(norm)
    if gathers and isinstance(block.attention, LatentAttention):
        found.append(block.attention.get_submodule("entry"))
    if gathers and not again and isinstance(block.mlp, MixtureOfExperts) and block.mlp.shared is not None:
        found.append(block.mlp.shared.get_submodule("entry"))
    return found


def _normalise_within(module: nn.Module, norm: nn.Module) -> None:
    """Let a module normalise its input itself, and `norm` pass that on.

    Compilers keep tensors that one recomputed function hands to another, such as the output of a norm.
    """
    normalise, forward = norm.forward, module.forward
    module.forward = lambda x: forward(normalise(x))  # type: ignore[method-assign]
    norm.forward = _same  # type: ignore[method-assign]


def _same(x: Tensor) -> Tensor:
    return x


def _networks(block: Block) -> list[MLP | Experts]:
    """The MLP of a layer, or its routed and shared experts."""
    if isinstance(block.mlp, MLP):
        return [block.mlp]
    assert isinstance(block.mlp, MixtureOfExperts)
    shared = [] if block.mlp.shared is None else [block.mlp.shared]
    return [block.mlp.experts, *shared]


def _wrap(module: nn.Module, drop_output: bool = False) -> None:
    forward = module.forward

    def again(*inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            result: Tensor = forward(*inputs)
        elif torch.compiler.is_compiling():
            result = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            call = _Call(forward, inputs)
            result = call.run(*inputs)
            if drop_output and _outputs:
                _outputs[-1].append((weakref.ref(result), call))
        return result

    module.forward = again  # type: ignore[method-assign]


def _run_units(units: Sequence[Sequence[Block]], x: Tensor) -> Tensor:
    # The layers are called, not their forward functions: FSDP2 gathers parameters around the call.
    for unit in units:
        run = partial(run_blocks, unit)
        x = _Call(run, (x,)).run(x) if torch.is_grad_enabled() else run(x)
    return x


def run_blocks(blocks: Sequence[Block], x: Tensor) -> Tensor:
    """The layers `blocks`, one after the other."""
    for block in blocks:
        x = block(x)
    return x


def _drop_outputs(module: Block | MixtureOfExperts) -> None:
    forward = module.forward

    def dropping(x_BSD: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _outputs:
            return forward(x_BSD)
        with _outputs_of_one_layer(), saved_tensors_hooks(pack, unpack):
            return forward(x_BSD)

    module.forward = dropping  # type: ignore[method-assign]


def is_recomputing() -> bool:
    """True during recomputation, where counts of the forward pass must not be repeated."""
    # Only backward runs forward functions a second time, in compiled layers too.
    return torch._C._current_graph_task_id() != -1


_outputs: list[list[tuple[weakref.ref[Tensor], _Call]]] = []
"""Recomputed outputs of the current layer, and the calls that made them."""


@contextmanager
def _outputs_of_one_layer() -> Iterator[None]:
    _outputs.append([])
    try:
        yield
    finally:
        _outputs.pop()


def _is_view(tensor: Tensor, output: Tensor) -> bool:
    return memory_of(tensor) == memory_of(output) and tensor.dtype == output.dtype


class _Enough(Exception):
    """Exception that ends recomputation when all needed tensors are computed."""


class _Inputs(torch.autograd.Function):
    """An autograd function that saves inputs as tensors, so that saved-tensor hooks around this call see
    them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("nothing uses the output of this node")


class _Call:
    """One call of `function` for which the autograd graph keeps only the inputs.

    Tensors for backward are numbered in the order in which the function saves them. This order identifies
    them in the second run, so the function must do the same in every run.
    """

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self.function = function
        # The tensor keeps its node, and that the inputs.
        self.anchor: Any = _Inputs.apply(torch.empty(0, requires_grad=True), *inputs)  # type: ignore[no-untyped-call]
        self.saved = 0
        self.internals: dict[int, Tensor] = {}
        self.served = False
        """Backward has had all internals once: the second part of a split backward may need none."""
        self.views = 0
        self.unpacked_views = 0
        self.output: Tensor | None = None

    def run(self, *inputs: Tensor) -> Tensor:
        """Run forward without keeping its saved tensors."""
        with saved_tensors_hooks(self._pack_internal, unpack):
            return self.function(*inputs)

    def pack_output(self, view: Tensor) -> Packed:
        """The packed form of a view of the output."""
        self.views += 1
        return partial(self._output, view.shape, view.stride(), int(view.storage_offset()))

    def _pack_internal(self, tensor: Tensor) -> Packed:
        self.saved += 1
        return partial(self._internal, self.saved - 1)

    def _internal(self, number: int) -> Tensor:
        if number not in self.internals:
            self._run_again(with_internals=True)
        tensor = self.internals.pop(number)
        self.served = self.served or not self.internals
        return tensor

    def _output(self, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        if self.output is None:
            self._run_again(with_internals=not self.served)
        assert self.output is not None
        view = self.output.as_strided(shape, stride, offset)
        self.unpacked_views += 1
        if self.unpacked_views == self.views:
            self.unpacked_views, self.output = 0, None
        return view

    def _run_again(self, with_internals: bool) -> None:
        # Backward of internals comes after that of the views: then nobody needs the output any more.
        with_output = self.views > 0 and (not self.served or not with_internals)
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in self.anchor.grad_fn.saved_tensors
        ]
        if not with_internals:
            with torch.no_grad():
                self.output = self.function(*inputs)
            return
        found: list[Tensor] = []

        def capture(tensor: Tensor) -> None:
            found.append(tensor.detach())
            if len(found) == self.saved and not with_output:
                raise _Enough

        try:
            with torch.enable_grad(), saved_tensors_hooks(capture, unpack):
                output = self.function(*inputs)
            if with_output:
                self.output = output.detach()
        except _Enough:
            pass
        if len(found) != self.saved:
            raise RuntimeError(
                f"{self.function}: forward saved {self.saved} tensors, its repetition {len(found)}; "
                "recompute only what does the same on every run"
            )
        self.internals = dict(enumerate(found))
        if self.served:
            _forget_last(self)


_last: list[weakref.ref[_Call]] = []
"""The last call that was recomputed for a separate weight-gradient pass."""


def _forget_last(call: _Call) -> None:
    """Drop what the call before `call` computed for gradients of weights, and these have not read.

    They read some of a layer's internals only; without this, the rest would stay until the whole stage is
    done.
    """
    for last in (reference() for reference in _last):
        if last is not None and last is not call:
            last.internals.clear()
    _last[:] = [weakref.ref(call)]
