"""Parameters in 16 bits for ranks that share none, beside those in fp32 that the optimizer sees.

FSDP2 keeps the two apart as well, and what is computed is the same to the bit; but where nothing is split or
reduced, its hooks around every layer are host time for nothing. Copies are there while a step computes, and
take no memory while the optimizer works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from costmodels import Layout
from runtime.model.experts import MixtureOfExperts
from runtime.model.number_formats import DTYPES
from runtime.model.transformer import Transformer
from runtime.parallel.local_tensors import local_part

KEEPS_WIDE = torch.__version__ >= "2.15"
"""FSDP2 adds up what autograd gives in more than 16 bits, as it does for norms, without rounding it."""


class GradientSums:
    """Gradients of one layer's parameters, added up over micro batches in the format of the reduction."""

    def __init__(self, copies: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.copies, self.dtype = copies, dtype
        self.converts = dtype != copies[0].dtype
        self.sums: dict[int, Tensor] = {}
        self.local_sums: dict[int, Tensor] = {}
        """This rank's parts of them."""
        self.left = len(copies) if self.converts else 0
        """Gradients that the first backward pass has not made."""
        self.hooks: dict[Tensor, Any] = {}
        if self.converts:
            for copy in copies:
                if KEEPS_WIDE:
                    copy.grad_dtype = None
                self.hooks[copy] = copy.register_post_accumulate_grad_hook(self.come)  # type: ignore[no-untyped-call]

    def come(self, copy: Tensor) -> None:
        """Take note that one gradient is there; the last one of a backward pass adds them all up.

        It is the same one in every pass, so that the others need not tell after the first. Were it another
        one, what comes after it would be added in the next pass, or at the end.
        """
        if self.left:
            self.left -= 1
            if self.left:
                return
            for other, hook in self.hooks.items():
                if other is not copy:
                    hook.remove()
        self.add()

    def add(self) -> None:
        """Add the gradients that are there, and drop them."""
        known: list[Tensor] = []
        more: list[Tensor] = []
        for number, copy in enumerate(self.copies):
            gradient = copy.grad
            if gradient is None:
                continue
            copy.grad = None
            if number in self.sums:
                known.append(self.local_sums[number])
                more.append(local_part(gradient))
            else:
                self.sums[number] = gradient.to(self.dtype)
                self.local_sums[number] = local_part(self.sums[number])
        if known:
            torch._foreach_add_(known, more)

    def take(self) -> Iterator[tuple[int, Tensor]]:
        """The number of each copy that has a gradient, and that in fp32; afterwards none is here."""
        if self.converts:
            self.add()
            self.local_sums.clear()
            for number in list(self.sums):
                yield number, self.sums.pop(number).float()
            return
        for number, copy in enumerate(self.copies):
            if copy.grad is not None:
                gradient, copy.grad = copy.grad, None
                yield number, gradient.float()


class WorkingCopies:
    """The parameters of a stage in the format that computes."""

    def __init__(self, stage: Transformer, layout: Layout) -> None:
        dtype = DTYPES[layout.precision]
        self.copies: dict[nn.Parameter, nn.Parameter] = {}
        self.places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in stage.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    continue
                if parameter not in self.copies:
                    self.copies[parameter] = nn.Parameter(parameter.detach().to(dtype))
                self.places.append((module, name, parameter))
        self.parameters = [local_part(one.detach()) for one in self.copies]
        self.locals = [local_part(one.detach()) for one in self.copies.values()]
        self.bytes = [one.untyped_storage().nbytes() for one in self.locals]
        self.groups = [
            (masters, GradientSums([self.copies[one] for one in masters], DTYPES[layout.gradient_reduction]))
            for masters in _groups(stage)
        ]
        self._free()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the stage have its copies, and afterwards its parameters their gradients."""
        self.fill()
        self._put(self.copies)
        try:
            yield
        finally:
            self._put({one: one for one in self.copies})
            self._free()
        self.hand_over()

    def fill(self) -> None:
        """Make the copies those of the parameters as they are."""
        for local, size in zip(self.locals, self.bytes, strict=True):
            local.untyped_storage().resize_(size)
        torch._foreach_copy_(self.locals, self.parameters)

    def add_gradients(self) -> None:
        """Add up gradients that no backward pass of autograd has made, but a schedule that splits it."""
        for _, sums in self.groups:
            if sums.converts:
                sums.add()

    def hand_over(self) -> None:
        """Give the parameters their gradients in fp32."""
        for masters, sums in self.groups:
            for number, gradient in sums.take():
                masters[number].grad = gradient

    def _put(self, values: dict[nn.Parameter, nn.Parameter]) -> None:
        for module, name, parameter in self.places:
            module._parameters[name] = values[parameter]

    def _free(self) -> None:
        for local in self.locals:
            local.untyped_storage().resize_(0)


def _groups(stage: Transformer) -> list[list[nn.Parameter]]:
    """The parameters of each layer's experts, of each layer, and all others, each once."""
    experts = [block.mlp.experts for block in stage.blocks if isinstance(block.mlp, MixtureOfExperts)]
    groups: list[list[nn.Parameter]] = []
    grouped: set[nn.Parameter] = set()
    for module in (*experts, *stage.blocks, stage):
        groups.append([one for one in module.parameters() if one.requires_grad and one not in grouped])
        grouped.update(groups[-1])
    return [group for group in groups if group]


@contextmanager
def computing(copies: Sequence[WorkingCopies]) -> Iterator[None]:
    """Let all stages have their copies meanwhile."""
    with ExitStack() as stack:
        for one in copies:
            stack.enter_context(one.computing())
        yield
