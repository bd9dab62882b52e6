"""Working copies of parameters for computation, if data-parallel ranks do not shard them.

FSDP2 also separates these from the optimizer's parameters, with bitwise equal results unless GEMMs add to
sums (`runtime.parallel.summing_linear`). But without sharding, its hooks around every layer only take host
time. 16-bit copies exist during a step's passes, and take no memory during the optimizer step; fp32 copies
share the parameters' memory. If other ranks hold the same parameters, gradients of a layer accumulate in one
buffer. In the last backward pass of a step it is summed over these ranks as soon as the layer is done, while
backward continues with the layers before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from costmodels import Layout
from costmodels.pytorch import is_at_least
from costmodels.spec.hardware import NARROW
from runtime.model.experts import MixtureOfExperts
from runtime.model.number_formats import DTYPES
from runtime.model.transformer import Transformer
from runtime.parallel.local_tensors import as_distributed, local_part
from runtime.parallel.narrow_weight import TENSORWISE, NarrowWeight, use_multiply
from runtime.parallel.replicas import gradient_spec, group_of, is_split, without_replicas
from runtime.parallel.summing_layers import kind_of, sizes_of, use_place
from runtime.parallel.summing_linear import PLACE, Place, can_sum, keep_in_graphs, sums_in_gemms
from runtime.parallel.summing_trial import adds_in_kernel

if TYPE_CHECKING:
    from runtime.parallel.float8_weights import Float8Weights

KEEPS_WIDE = is_at_least("2.15")
"""True if gradients of more than 16 bits, such as those of norms, accumulate without rounding, as in FSDP2.
Parameters that are distributed tensors are the exception."""


class GradientSums:
    """Gradients of one layer's parameters, accumulated over microbatches in the format of the reduction.

    Args:
        group: ranks that sum the gradients at the end, if there are several.
        when_done: called when the last backward pass of a step, announced by `count_last`, has made all
            gradients.
    """

    def __init__(
        self,
        copies: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        when_done: Callable[[], None],
    ) -> None:
        self.copies, self.dtype, self.group, self.when_done = list(copies), dtype, group, when_done
        self.adds = group is not None or dtype != copies[0].dtype
        """The sums are made here: autograd does not add the gradients up itself."""
        self.leaves: list[Tensor] = list(copies)
        """Tensors of the copies whose gradients autograd reports."""
        self.places: list[Place] = []
        """Places of the sums that GEMMs add to."""
        self.formats = [getattr(copy, "grad_dtype", copy.dtype) for copy in copies]
        """Number formats that autograd casts each gradient to; None where it leaves a gradient as it is."""
        self.sizes = [local_part(copy.detach()).numel() for copy in copies]
        self.buffer: Tensor | None = None
        """Memory of all gradients, where ranks sum them."""
        self.work: Any = None
        self.sums: dict[int, Tensor] = {}
        """The sum of each copy, by the copy's number."""
        self.left = 0
        """The number of gradients that the running backward pass has yet to make, while they are counted."""
        self.is_last = False
        """The running backward pass is the last one of the step."""
        self.is_whole = False
        """Autograd has made all gradients."""
        self.hooks: dict[Tensor, Any] = {}
        self.stays = False
        """Sums keep their places from step to step."""
        if self.adds:
            self._count()

    def clear(self) -> None:
        """Set all sums to zero, at addresses that stay fixed from now on."""
        if self.stays:
            torch._foreach_zero_(self._held())
            return
        self.stays = True
        parts = [local_part(copy.detach()) for copy in self.copies]
        if self.group is not None:
            self.buffer = parts[0].new_zeros(sum(self.sizes), dtype=self.dtype)
            self.sums = {
                number: self._place(self.buffer, number).view(part.shape) for number, part in enumerate(parts)
            }
        elif self.adds:
            self.sums = {
                number: torch.zeros_like(part, dtype=self.dtype) for number, part in enumerate(parts)
            }
        else:
            for copy in self.copies:
                copy.grad = torch.zeros_like(copy)

    def _held(self) -> list[Tensor]:
        if self.buffer is not None:
            return [self.buffer]
        if self.adds:
            return list(self.sums.values())
        return [local_part(copy.grad) for copy in self.copies if copy.grad is not None]

    def count_last(self) -> None:
        """Count the gradients of the next backward pass, which is the last one of the step."""
        self.is_last = True
        self._count()

    def _count(self) -> None:
        come = _weakly(self.come)
        for leaf in self.leaves:
            if leaf not in self.hooks:
                self.hooks[leaf] = leaf.register_post_accumulate_grad_hook(come)  # type: ignore[no-untyped-call]
        self.left = len(self.leaves)

    def add_in_gemm(self, copy: nn.Parameter, layer: nn.Module, name: str = PLACE) -> None:
        """Let the GEMM of a layer add the gradients of its weight to the sum, whose place it gets by name."""
        number = next(at for at, one in enumerate(self.copies) if one is copy)
        place = Place(layer, copy.device, partial(self.receive, number), name)
        self.places.append(place)
        self.leaves[number] = place.tensor
        self.hooks.pop(copy).remove()
        self._count()

    def receive(self, number: int) -> tuple[Tensor, bool]:
        """The sum of a copy, for what adds to it by itself, and whether it holds a gradient yet."""
        holds = number in self.sums
        if not holds:
            self.sums[number] = self._memory(number)
        return self.sums[number], holds

    def come(self, leaf: Tensor) -> None:
        """Record that one gradient is complete; the last one of a backward pass triggers the accumulation of
        all.

        The last one is the same in every pass, so the others need not report after the first pass. If it were
        another one, later gradients would be added in the next pass, or at the end.
        """
        if not self.left:
            self.add()
            return
        self.left -= 1
        if self.left:
            return
        for other in [one for one in self.hooks if one is not leaf]:
            self.hooks.pop(other).remove()
        self.add()
        if self.is_last:
            self.is_whole = True
            self.when_done()

    def give(self, gradients: Sequence[tuple[int, Tensor]]) -> None:
        """Add one backward pass's gradients of the whole layer, by the numbers of their copies."""
        rounded = [(number, self._as_autograd(number, gradient)) for number, gradient in gradients]
        if self.adds:
            self._add(rounded)
        else:
            self._leave(rounded)
        if self.is_last:
            self.is_whole = True
            self.when_done()

    def _as_autograd(self, number: int, gradient: Tensor) -> Tensor:
        """A gradient in the format in which autograd hands it to a parameter."""
        dtype = self.formats[number]
        return gradient if dtype is None or dtype == gradient.dtype else gradient.to(dtype)

    def _leave(self, gradients: Sequence[tuple[int, Tensor]]) -> None:
        """Add gradients to the copies' gradients, as autograd does."""
        known, more = [], []
        for number, gradient in gradients:
            copy = self.copies[number]
            if copy.grad is None:
                copy.grad = gradient
            else:
                known.append(copy.grad)
                more.append(gradient)
        if known:
            torch._foreach_add_(known, more)

    def add(self) -> None:
        """Add the present gradients to the sums, and free them."""
        self._add(self._taken())

    def _taken(self) -> Iterator[tuple[int, Tensor]]:
        for number, copy in enumerate(self.copies):
            if copy.grad is not None:
                gradient, copy.grad = local_part(copy.grad), None
                yield number, gradient

    def _add(self, gradients: Iterable[tuple[int, Tensor]]) -> None:
        known: list[Tensor] = []
        more: list[Tensor] = []
        for number, gradient in gradients:
            if number in self.sums:
                known.append(self.sums[number])
                more.append(gradient)
            else:
                self.sums[number] = self._first(number, gradient)
        if known:
            torch._foreach_add_(known, more)

    def _first(self, number: int, gradient: Tensor) -> Tensor:
        return gradient.to(self.dtype) if self.group is None else self._memory(number).copy_(gradient)

    def _memory(self, number: int) -> Tensor:
        """Memory for the sum of a copy."""
        copy = local_part(self.copies[number].detach())
        if self.group is None:
            return torch.empty_like(copy, dtype=self.dtype)
        if self.buffer is None:
            self.buffer = copy.new_empty(sum(self.sizes), dtype=self.dtype)
        return self._place(self.buffer, number).view(copy.shape)

    def _place(self, buffer: Tensor, number: int) -> Tensor:
        start = sum(self.sizes[:number])
        return buffer[start : start + self.sizes[number]]

    def reduce(self) -> None:
        """Begin the sum over the ranks."""
        self.add()
        if self.buffer is not None:
            for number in range(len(self.copies)):
                if number not in self.sums:
                    self._place(self.buffer, number).zero_()
            self.work = dist.all_reduce(self.buffer, group=self.group, async_op=True)

    def take(self) -> Iterator[tuple[int, Tensor]]:
        """The number and the fp32 gradient of each copy that has one; the gradients are then removed here."""
        if self.work is not None:
            self.work.wait()
        self.work = None
        self.is_last = self.is_whole = False
        if self.stays:
            for number, copy in enumerate(self.copies):
                held = self.sums[number] if self.adds else copy.grad
                assert held is not None
                yield number, local_part(held).float()
            return
        self.buffer = None
        if self.adds:
            self.add()
            for number in list(self.sums):
                yield number, self.sums.pop(number).float()
            return
        for number, gradient in self._taken():
            yield number, gradient.float()


class WorkingCopies:
    """The parameters of a stage in the format of GEMMs: this rank's parts, as plain tensors.

    With distributed tensors, compiled functions would unwrap parameters and wrap gradients in every call.
    8-bit GEMMs have distributed tensors all the same, as compilers keep other tensors of plain weights for
    backward than under FSDP2.

    Args:
        tokens: tokens of a microbatch on this rank, of which kernels are tried out.
    """

    def __init__(self, stage: Transformer, layout: Layout, compiled: bool = False, tokens: int = 1) -> None:
        dtype = DTYPES[layout.precision]
        part = without_replicas if layout.precision in NARROW else local_part
        self.copies: dict[nn.Parameter, nn.Parameter] = {}
        self.places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in stage.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    continue
                if parameter not in self.copies:
                    self.copies[parameter] = nn.Parameter(part(parameter.detach()).to(dtype))
                self.places.append((module, name, parameter))
        self.float8_weights: Float8Weights | None = None
        self.narrow: dict[nn.Parameter, NarrowWeight] = {}
        """Weights that compute in 8 bits alone: their copies are there for gradients, and hold nothing."""
        if layout.precision == "fp8" and layout.fp8_recipe in TENSORWISE:
            # Brings PyTorch's compiler, which no other layout need wait for.
            from runtime.parallel.float8_weights import Float8Weights

            self.float8_weights = Float8Weights(stage, self.copies, compiled)
            self.narrow = self.float8_weights.places
            for copy in self.narrow:
                local_part(copy.detach()).untyped_storage().resize_(0)
        apart = {
            one: copy
            for one, copy in self.copies.items()
            if copy.dtype != one.dtype and copy not in self.narrow
        }
        self.parameters = [local_part(one.detach()) for one in apart]
        self.locals = {one: local_part(one.detach()) for one in apart.values()}
        """Local parts of the copies that do not share the memory of the parameters."""
        self.bytes = [one.untyped_storage().nbytes() for one in self.locals.values()]
        self.groups = [
            (masters, self._sums(masters, DTYPES[layout.gradient_reduction])) for masters in _groups(stage)
        ]
        if compiled:
            self._add_in_gemms(stage, layout, tokens)
        self.gradient_specs = {master: gradient_spec(master) for master in self.copies}
        self.stays = False
        """Copies and sums keep their memory from step to step."""
        self.waiting: list[GradientSums] = []
        """Sums whose reduction the running step has not begun, in the order in which ranks reduce them."""
        self._free((*self.locals, *self.narrow))

    def _sums(self, masters: list[nn.Parameter], dtype: torch.dtype) -> GradientSums:
        copies, group = [self.copies[one] for one in masters], group_of(masters[0])
        if group is None and copies[0].dtype == masters[0].dtype:
            dtype = copies[0].dtype
        for master, copy in zip(masters, copies, strict=True):
            if KEEPS_WIDE and copy.dtype != dtype and not is_split(master):
                copy.grad_dtype = None
        return GradientSums(copies, dtype, group, self._reduce_whole)

    def _add_in_gemms(self, stage: Transformer, layout: Layout, tokens: int) -> None:
        """Let GEMMs of compiled layers add the gradients of their weights, if these have 16 bits and their
        sums fp32."""
        keep_in_graphs()
        by_kernels: dict[str, list[tuple[nn.Module, str, nn.Parameter]]] = {}
        wide = [sums for _, sums in self.groups if sums.dtype == torch.float32]
        sums_of = {copy: sums for sums in wide for copy in sums.copies if copy.dtype != sums.dtype}
        layers = {module for block in stage.blocks for module in block.modules()}
        for linear, name, weight in self.places:
            copy = self.copies[weight]
            if linear not in layers or copy not in sums_of:
                continue
            kind = kind_of(linear, name, copy)
            if kind is not None:
                by_kernels.setdefault(kind, []).append((linear, name, copy))
                continue
            if not isinstance(linear, nn.Linear) or name != "weight" or isinstance(copy, DTensor):
                continue
            if not can_sum(linear):
                continue
            if sums_in_gemms(copy.device, copy.dtype):
                sums_of[copy].add_in_gemm(copy, linear)
                use_multiply(linear)
        for kind, found in by_kernels.items():
            one = max((copy for _, _, copy in found), key=Tensor.numel)
            if adds_in_kernel(kind, one.device, one.dtype, sizes_of(one, stage, layout, tokens)):
                for module, name, copy in found:
                    sums_of[copy].add_in_gemm(copy, module, use_place(module, name))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Give the stage its copies within this context, and afterwards the parameters their gradients."""
        self.fill()
        self._put(self.copies)
        trains = torch.is_grad_enabled()
        if self.stays and trains:
            for _, sums in self.groups:
                sums.clear()
        self.waiting = [sums for _, sums in self.groups if sums.group is not None]
        try:
            yield
        finally:
            self._put({one: one for one in self.copies})
            self._free((*self.locals, *self.narrow))
        if trains or not self.stays:
            self.hand_over()

    def stay(self) -> None:
        """Keep copies and gradient sums at fixed addresses, from the first step on."""
        self.stays = True

    def fill(self) -> None:
        """Fill the copies from the present parameters."""
        into = list(self.locals.values())
        for local, size in zip(into, self.bytes, strict=True):
            # To the same size it would move, too.
            if local.untyped_storage().nbytes() != size:
                local.untyped_storage().resize_(size)
        if into:
            torch._foreach_copy_(into, self.parameters)
        if self.float8_weights is not None:
            self.float8_weights.fill()

    def add_gradients(self) -> None:
        """Accumulate gradients made by a split-backward schedule instead of autograd's backward."""
        for _, sums in self.groups:
            if sums.adds:
                sums.add()

    def reduce_next(self) -> None:
        """Let the next backward pass, the last of the step, reduce gradients layer by layer."""
        for sums in self.waiting:
            sums.count_last()

    def reduce(self) -> None:
        """Reduce the remaining gradients after the last backward pass of a step."""
        for sums in self.waiting:
            sums.is_whole = True
        self._reduce_whole()

    def _reduce_whole(self) -> None:
        """Reduce layers with complete gradients, and free their copies.

        All ranks use the same order of layers.
        """
        while self.waiting and self.waiting[0].is_whole:
            sums = self.waiting.pop(0)
            sums.reduce()
            self._free(sums.copies)

    def hand_over(self) -> None:
        """Give the parameters their gradients in fp32."""
        self.reduce()
        for masters, sums in self.groups:
            for number, gradient in sums.take():
                master = masters[number]
                master.grad = as_distributed(gradient, self.gradient_specs[master])

    def _put(self, values: dict[nn.Parameter, nn.Parameter]) -> None:
        for module, name, parameter in self.places:
            module._parameters[name] = values[parameter]

    def _free(self, copies: Iterable[nn.Parameter]) -> None:
        if self.stays:
            return
        for copy in copies:
            if copy in self.locals:
                self.locals[copy].untyped_storage().resize_(0)
            elif copy in self.narrow:
                self.narrow[copy].free()


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook with a weak reference, as the garbage collector does not see references in a tensor's hooks."""
    reference = WeakMethod(method)

    def call(tensor: Tensor) -> None:
        called = reference()
        if called is not None:
            called(tensor)

    return call


def _groups(stage: Transformer) -> list[list[nn.Parameter]]:
    """The parameters of each layer's experts, of each layer, and all others, each once, in the order of
    backward."""
    modules: list[nn.Module] = []
    for block in reversed(stage.blocks):
        modules += [block.mlp.experts, block] if isinstance(block.mlp, MixtureOfExperts) else [block]
    groups: list[list[nn.Parameter]] = []
    grouped: set[nn.Parameter] = set()
    for module in (*modules, stage):
        groups.append([one for one in module.parameters() if one.requires_grad and one not in grouped])
        grouped.update(groups[-1])
    return [group for group in groups if group]


@contextmanager
def computing(copies: Sequence[WorkingCopies]) -> Iterator[None]:
    """Give all stages their copies within this context."""
    with ExitStack() as stack:
        for one in copies:
            stack.enter_context(one.computing())
        yield
