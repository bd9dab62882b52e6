"""Operations of a dry run that are repeated return what PyTorch's own fake tensors return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from costmodels import ModelSpec
from runtime.dryrun import compiled_layers, repeats
from runtime.dryrun.run import trace
from tests.support.layouts import layout_of

aten: Any = torch.ops.aten

OPERATIONS: dict[str, Callable[[Tensor, Tensor], tuple[Any, tuple[Any, ...]]]] = {
    "view": lambda x, _: (aten.view.default, (x, [6, 4])),
    "transpose": lambda x, _: (aten.transpose.int, (x, 0, 2)),
    "slice": lambda x, _: (aten.slice.Tensor, (x, 1, 1, 3)),
    "split": lambda x, _: (aten.split.Tensor, (x, 2, 1)),
    "detach of a view": lambda x, _: (aten.detach.default, (x[1:].transpose(0, 1),)),
    "copy of a view": lambda x, _: (aten.contiguous.default, (x.transpose(0, 2),)),
    "expand": lambda x, _: (aten.expand.default, (x[:, :1], [2, 5, 4])),
    "product": lambda x, y: (aten.bmm.default, (x, y)),
    "whole number": lambda x, _: (aten.mul.Scalar, (x.long(), 2)),
    "real number": lambda x, _: (aten.mul.Scalar, (x.long(), 2.0)),
    "cast": lambda x, _: (aten._to_copy.default, (x,)),
    "list": lambda x, y: (aten.cat.default, ([x.transpose(1, 2), y], 2)),
    "in place": lambda x, y: (aten.add_.Tensor, (x, y.transpose(1, 2))),
    "two results": lambda x, _: (aten.var_mean.correction, (x, [2])),
    "empty": lambda x, _: (aten.empty.memory_format, ([3, 4],)),
}


def kept(tensor: Tensor) -> tuple[Any, ...]:
    """All that a dry run can see of a tensor but whose memory it is."""
    size = tensor.untyped_storage().nbytes()
    where = tensor.storage_offset(), tensor.device, size
    return tensor.dtype, tensor.shape, tensor.stride(), *where, tensor.requires_grad


@pytest.fixture
def fresh() -> Iterator[FakeTensorMode]:
    """A fake mode, and nothing remembered."""
    with patch.dict(repeats._known, clear=True), FakeTensorMode() as mode:
        yield mode


def tensors_of(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def asked_by_compilers(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation as compilers ask for it."""
    with repeats.repeats_of_compilers():
        return func(*args, **kwargs)


@pytest.mark.parametrize("ask", [repeats.call, asked_by_compilers])
@pytest.mark.parametrize("name", OPERATIONS)
def test_repeated_results_are_alike(name: str, ask: Any, fresh: FakeTensorMode) -> None:
    for _ in range(3):
        x, y = torch.empty(2, 3, 4), torch.empty(2, 4, 3)
        func, args = OPERATIONS[name](x, y)
        expected = func(*args)
        found = ask(func, args, {})
        assert type(found) is type(expected)
        for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
            assert kept(one) == kept(other)
            shares = [
                part.untyped_storage()._cdata == x.untyped_storage()._cdata or part is x
                for part in (one, other)
            ]
            assert shares[0] == shares[1]
            assert (one is x) == (other is x)
    assert repeats._known
    assert list(repeats._known.values()).count(None) == 0


def test_named_results_keep_their_names(fresh: FakeTensorMode) -> None:
    x = torch.empty(2, 3)
    for _ in range(2):
        with repeats.repeats_of_compilers():
            found = torch._refs.native_layer_norm(x, [3], None, None, 1e-5)
        assert [part.shape for part in found] == [(2, 3), (2, 1), (2, 1)]


def test_operands_that_are_one_are_not_taken_for_two(fresh: FakeTensorMode) -> None:
    x, y = torch.empty(3), torch.empty(3)
    for one, out in ((x, x), (x, y), (y, y), (y, x)):
        assert repeats.call(aten.add.out, (one, one), {"out": out}) is out


def test_numbers_of_two_kinds_are_told_apart(fresh: FakeTensorMode) -> None:
    x = torch.empty(3, dtype=torch.int64)
    kinds = [repeats.call(aten.mul.Scalar, (x, number), {}).dtype for number in (1, 1.0, 1, 1.0)]
    assert kinds == [torch.int64, torch.float32] * 2


def test_new_memory_is_new_each_time(fresh: FakeTensorMode) -> None:
    x = torch.empty(3)
    made = [repeats.call(aten.clone.default, (x,), {}) for _ in range(3)]
    assert len({one.untyped_storage()._cdata for one in (x, *made)}) == 4


def test_views_of_freed_memory_are_made_before_it_is_there_again(fresh: FakeTensorMode) -> None:
    for _ in range(2):
        x = torch.empty(12)
        x.untyped_storage().resize_(0)
        shown = repeats.call(aten.view.default, (x, [3, 4]), {})
        assert shown.shape == (3, 4)
        assert shown.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_what_follows_from_content_is_not_remembered(fresh: FakeTensorMode) -> None:
    repeats.call(aten.resize_.default, (torch.empty(3), [4]), {})
    real = torch.tensor(2.0)
    repeats.call(aten.neg.default, (real,), {})
    assert not repeats._known


LLAMA = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 128, "seq": 32}
GATED = {"gated": True, "activation": "silu", "norm": "rmsnorm", "position": "rope"}
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 32}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "experts": (
        EXPERTS,
        {
            "data_parallel": 2,
            "expert_parallel": 2,
            "zero_stage": 3,
            "tensor_parallel": 2,
            "precision": "fp16",
        },
        False,
    ),
    "pipeline": (
        {},
        {"pipeline_parallel": 2, "context_parallel": 2, "precision": "bf16", "recompute": "full"},
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_repeats_change_no_byte(name: str) -> None:
    model, fields, compiled = LAYOUTS[name]
    spec = ModelSpec.model_validate({"name": "llama", **LLAMA, **GATED, **model})
    layout = layout_of(spec, global_batch_size=4, **fields)
    found = trace(spec, layout, compiled=compiled)
    with (
        patch.object(repeats, "call", lambda func, args, kwargs: func(*args, **kwargs)),
        patch.object(compiled_layers, "repeats_of_compilers", nullcontext),
    ):
        expected = trace(spec, layout, compiled=compiled)
    assert found == expected
