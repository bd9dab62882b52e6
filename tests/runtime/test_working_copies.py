"""Copies of parameters that compute, and sums of their gradients, on one rank that stands for two."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.model.transformer import Transformer
from runtime.parallel.initialisation import initialise
from runtime.parallel.working_copies import GradientSums, WorkingCopies, _groups, computing
from tests.support.layouts import parse_layout
from tests.support.models import MODELS

RANKS = 2
"""Ranks of a group, which all hold the same gradients."""


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Tensors that ranks have summed up, in order; each sum is there once somebody waits for it."""
    done: list[Tensor] = []

    def all_reduce(x: Tensor, group: Any, async_op: bool) -> Any:
        assert async_op and group is not None
        done.append(x)
        return SimpleNamespace(wait=lambda: x.mul_(RANKS))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    yield done


def passes(copies: list[nn.Parameter], number: int) -> list[Tensor]:
    """Gradients of a backward pass, those of the pass `number`."""
    draw = torch.Generator().manual_seed(number)
    return [torch.randn(copy.shape, generator=draw).to(copy.dtype) for copy in copies]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("dtype", "sums"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_gradients_of_all_passes_are_summed_and_then_over_ranks(
    grouped: bool, stays: bool, given: bool, dtype: torch.dtype, sums: torch.dtype, reduced: list[Tensor]
) -> None:
    """Gradients come by autograd's hooks, or from code without autograd; two steps of three passes."""
    copies = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((3, 4), (5,), (2, 2))]
    done: list[str] = []
    group: Any = "the replicas" if grouped else None
    held = GradientSums(copies, sums, group, lambda: done.append("done"))
    for step in range(2):
        if stays:
            held.clear()
        expected = [torch.zeros(copy.shape, dtype=sums) for copy in copies]
        for number in range(3):
            gradients = passes(copies, 3 * step + number)
            if grouped and number == 2:
                held.count_last()
            assert not done
            if given:
                held.give(list(enumerate(gradients)))
            else:
                torch.autograd.backward(
                    [(one * pull).sum() for one, pull in zip(copies, gradients, strict=True)]
                )
            for total, gradient in zip(expected, gradients, strict=True):
                total += gradient
        if grouped:
            assert done.pop() == "done" and held.is_whole
            held.reduce()
        assert not done
        found = dict(held.take())
        assert list(found) == [0, 1, 2] and not held.is_whole and not held.is_last
        for number, total in enumerate(expected):
            assert found[number].dtype == torch.float32
            torch.testing.assert_close(found[number], total.float() * (RANKS if grouped else 1))
        if not stays:
            assert not list(held.take()), "they are given once"
    assert len(reduced) == (2 if grouped else 0)
    assert all(x.dtype == sums and x.numel() == 21 for x in reduced)


def test_a_parameter_without_a_gradient_counts_as_zeros_among_ranks(reduced: list[Tensor]) -> None:
    copies = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4))]
    group: Any = "the replicas"
    held = GradientSums(copies, torch.float32, group, lambda: None)
    held.give([(1, torch.tensor([5.0, 6.0]))])
    held.reduce()
    assert reduced[0].tolist() == [0.0] * 3 + [5.0, 6.0] + [0.0] * 4
    assert [(number, one.tolist()) for number, one in held.take()] == [(1, [10.0, 12.0])]


def test_parameters_are_grouped_as_backward_comes_to_them() -> None:
    stage = Transformer(MODELS["mixtral"], 256)
    names = {parameter: name for name, parameter in stage.named_parameters()}
    groups = [sorted({names[one].rpartition(".")[0] for one in group}) for group in _groups(stage)]
    assert [group for group in groups if group[0].endswith("experts")] == groups[:8:2]
    assert [group[0].split(".")[1] for group in groups[:8]] == list("33221100")
    assert set(groups[8]) == {"embedding.tokens", "head", "norm"} and len(groups) == 9
    assert sum(map(len, _groups(stage))) == len(names)


def built(text: str) -> tuple[Transformer, WorkingCopies]:
    spec = MODELS["llama"].model_copy(update={"layers": 2})
    stage = Transformer(spec, 256)
    initialise(stage, spec, 1)
    stage.place(torch.arange(spec.seq))
    return stage, WorkingCopies(stage, parse_layout(text, spec))


@pytest.mark.parametrize("stays", [False, True])
def test_copies_are_those_of_the_parameters_and_have_memory_while_a_step_computes(stays: bool) -> None:
    stage, copies = built("precision=bf16")
    if stays:
        copies.stay()
    masters = dict(stage.named_parameters())
    tokens = torch.arange(32).view(1, 32)

    def held() -> int:
        return sum(local.untyped_storage().nbytes() for local in copies.locals.values())

    whole = sum(2 * one.numel() for one in masters.values())
    assert held() == 0
    for step in range(2):
        with computing([copies]):
            own = dict(stage.named_parameters())
            assert held() == whole
            for name, master in masters.items():
                assert own[name].dtype == torch.bfloat16 and own[name] is not master
                assert torch.equal(own[name], master.bfloat16())
            logits = stage(tokens)
            logits.float().square().mean().backward()
            # Autograd has nothing of bf16 to add to in the next pass.
            assert stays or all(one.grad is None for one in own.values() if one.dtype != torch.bfloat16)
        assert held() == (whole if stays else 0)
        assert dict(stage.named_parameters()) == masters
        plain, _ = built("precision=bf16")
        plain.load_state_dict(stage.state_dict())
        narrow = plain.bfloat16()
        narrow.place(torch.arange(32))
        narrow(tokens).float().square().mean().backward()
        for name, one in narrow.named_parameters():
            found = masters[name].grad
            assert found is not None and found.dtype == torch.float32 and one.grad is not None
            torch.testing.assert_close(found, one.grad.float(), msg=f"{name} of step {step}")
        with torch.no_grad():
            for master in masters.values():
                master.add_(0.01)
                master.grad = None
    with torch.no_grad(), computing([copies]):
        assert torch.equal(stage(tokens), stage(tokens))
    assert all(master.grad is None for master in masters.values())


def test_layers_are_reduced_one_after_the_other_in_the_last_pass(
    reduced: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.parallel import working_copies

    monkeypatch.setattr(working_copies, "group_of", lambda parameter: "the replicas")
    stage, copies = built("precision=bf16,gbs=4")
    masters = dict(stage.named_parameters())
    tokens = torch.arange(32).view(1, 32)
    seen: list[int] = []
    for block in stage.blocks:
        block.register_full_backward_hook(lambda *_: seen.append(len(reduced)))
    with computing([copies]):
        for number in range(2):
            if number:
                assert not reduced
                copies.reduce_next()
            stage(tokens).float().square().mean().backward()
        # Layers that are done are on their way before the ones before them compute; the rest comes last.
        assert len(reduced) == len(copies.groups) == 3
        assert all(not local.untyped_storage().nbytes() for local in copies.locals.values())
    assert seen[:2] == [0, 0] and seen[2] < seen[3] <= 2
    assert len(reduced) == 3
    sizes = [sum(one.numel() for one in group) for group, _ in copies.groups]
    assert [x.numel() for x in reduced] == sizes
    again, plain = built("precision=bf16,gbs=4")
    monkeypatch.undo()
    again, plain = built("precision=bf16,gbs=4")
    with computing([plain]):
        for _ in range(2):
            again(tokens).float().square().mean().backward()
    for name, one in again.named_parameters():
        assert one.grad is not None
        torch.testing.assert_close(masters[name].grad, RANKS * one.grad)
