"""A cache of operations on fake tensors that is faster than PyTorch's own.

A training step repeats few different operations many times, as layers and microbatches are equal. The result
of an operation depends on the shapes, strides, formats and devices of its operands, and on its other
arguments. It is recorded the first time. After that, results are made several times faster than from the
cache of `FakeTensorMode`, which handles cases that the runtime's tensors never have (symbolic sizes, sparse
layouts, constants). Compilers also request the same operations repeatedly while they trace a layer, decompose
it and derive its backward; they use this cache too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from runtime.dryrun.fake_gpu import kernel_device

NAMESPACES = ("aten", "prims", "_c10d_functional")
"""Namespaces of operators whose results depend only on their arguments."""

IDLE_OPERATORS = frozenset(
    (
        *(getattr(torch.ops.c10d, name).default for name in ("allreduce_", "send", "recv_")),
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)
"""Operators without effect and without result if there are no other ranks and no profiler."""

SHAPE_TAGS = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of operators that change the shape of an operand, or whose results depend on its content."""

MOST_RESULTS = 50_000
"""Most cached results of all dry runs in a process; beyond, the cache is cleared."""

FAKE_ATTRIBUTES = ("fake_mode", "fake_device", "_fake_device")
"""Attributes of a fake tensor that are not cached with the others."""

NUMBERS = (int, float, bool)

PLAIN_TYPES = (type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)

Key = tuple[Any, ...]

_UNSEEN: Any = object()

# Taken before `fake_gpu` puts its own in the place.
_make_subclass: Any = Tensor._make_subclass


class ResultTensor(NamedTuple):
    """A tensor that an operation returns."""

    operand: int | None
    """The number of the operand that the tensor equals or is a view of; None for new memory."""
    is_operand: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    """The device of the fake tensor."""
    backend: torch.device
    """The device whose operators autograd uses."""
    attributes: dict[str, Any]
    """Other attributes of the fake tensor, except its mode."""


class Result(NamedTuple):
    """The result of an operation."""

    parts: tuple[ResultTensor | int | float | None, ...]
    """Tensors, and unchanged numbers."""
    kind: type | None
    """List or tuple; None for a single tensor."""


_known: dict[Key, Result | None] = {}
"""Cached results by operator and arguments; None for operations that must be computed each time."""

_eligible: dict[Any, bool] = {}
"""True if the results of an operator depend only on its arguments."""

_shows: dict[Any, bool] = {}
"""True if an operator always returns a view of its operand."""

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation under the active fake mode, if there is one."""
    if func in IDLE_OPERATORS:
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)
    mode: Any = torch._C._get_dispatch_mode(_FAKE)
    if mode is None or not _is_eligible(func):
        return func(*args, **kwargs)
    found = operation_key(mode, func, args, kwargs)
    if found is None:
        return func(*args, **kwargs)
    key, operands = found
    result = _known.get(key, _UNSEEN)
    if result is _UNSEEN:
        if _shows_operand(func) and len(operands) == 1:
            result = _known[key] = _views_of(mode, func, args, kwargs, operands[0])
        else:
            # PyTorch's cache would be no use besides this one.
            mode.cache_enabled = False
            try:
                returned = func(*args, **kwargs)
            finally:
                mode.cache_enabled = True
            learn(mode, key, operands, returned)
            return returned
    return func(*args, **kwargs) if result is None else repeat(mode, result, operands)


@contextmanager
def repeats_of_compilers() -> Iterator[None]:
    """Within this context the fake modes of compilers use this cache instead of PyTorch's."""
    dispatch: Any = FakeTensorMode._cached_dispatch_impl

    def repeating(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        found = operation_key(mode, func, args, kwargs) if _is_eligible(func) else None
        if found is None:
            return dispatch(mode, func, types, args, kwargs)
        key, operands = found
        result = _known.get(key, _UNSEEN)
        if result is _UNSEEN:
            if _shows_operand(func) and len(operands) == 1:
                result = _known[key] = _views_of(mode, func, args, kwargs, operands[0])
            else:
                returned = mode._dispatch_impl(func, types, args, kwargs)
                learn(mode, key, operands, returned)
                return returned
        if result is None:
            return mode._dispatch_impl(func, types, args, kwargs)
        return repeat(mode, result, operands)

    with patch.object(FakeTensorMode, "_cached_dispatch_impl", repeating):
        yield


def _shows_operand(func: Any) -> bool:
    if func not in _shows:
        # Operators that are made of others may copy, as casts and `contiguous` do. Autograd takes them apart,
        # but wrappers and compilers call them whole.
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        _shows[func] = func.is_view and not has_kernel(func.name(), composite)
    return _shows[func]


def _is_eligible(func: Any) -> bool:
    if func not in _eligible:
        _eligible[func] = func.namespace in NAMESPACES and not any(tag in func.tags for tag in SHAPE_TAGS)
    return _eligible[func]


def operation_key(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> tuple[Key, list[Tensor]] | None:
    """The key that determines the result of an operation, and its operands; None where there is no such
    key."""
    key: list[Any] = [func, torch.get_default_dtype()]
    operands: list[Tensor] = []
    if not _describe(mode, args, key, operands):
        return None
    if kwargs:
        key.extend(kwargs)
        if not _describe(mode, kwargs.values(), key, operands):
            return None
    return tuple(key), operands


def _describe(mode: FakeTensorMode, args: Iterable[Any], key: list[Any], operands: list[Tensor]) -> bool:
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            if arg.fake_mode is not mode or arg.constant is not None:
                return False
            operands.append(arg)
            key += (arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.fake_device)
        elif kind in NUMBERS:
            # 1 equals 1.0 and True.
            key += (kind, arg)
        elif kind in PLAIN_TYPES:
            key.append(arg)
        elif kind is torch.Generator:
            key.append(kind)
        elif kind is list or kind is tuple:
            key.append(len(arg))
            if not _describe(mode, arg, key, operands):
                return False
        else:
            return False
    return True


def learn(mode: FakeTensorMode, key: Key, operands: Sequence[Tensor], result: Any) -> None:
    """Record the result of an operation."""
    if len(_known) >= MOST_RESULTS:
        _known.clear()
    _known[key] = _result_of(mode, operands, result)


def repeat(mode: FakeTensorMode, result: Result, operands: Sequence[Tensor]) -> Any:
    """New tensors for an operation with the recorded `result`."""
    made = [_make(mode, part, operands) if isinstance(part, ResultTensor) else part for part in result.parts]
    if result.kind is None:
        return made[0]
    # Python's forms of operators return named tuples.
    return getattr(result.kind, "_make", result.kind)(made)


def _make(mode: FakeTensorMode, made: ResultTensor, operands: Sequence[Tensor]) -> Tensor:
    operand, is_operand, shape, stride, offset, dtype, device, backend, attributes = made
    if is_operand:
        assert operand is not None
        return operands[operand]
    with torch._C._DisableTorchDispatch():
        plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if operand is not None:
        memory = operands[operand].untyped_storage()
        # As PyTorch's `in_kernel_invocation_manager`: what the storage holds is taken for meta memory.
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            mode.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                plain.set_(memory, offset, shape, stride)  # type: ignore[call-overload]
            finally:
                mode.in_kernel_invocation = False
    tensor: Any = _make_subclass(
        FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=backend
    )
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    tensor.__dict__.update(attributes)
    tensor.fake_mode, tensor.fake_device = mode, device
    return tensor  # type: ignore[no-any-return]


def _result_of(mode: FakeTensorMode, operands: Sequence[Tensor], result: Any) -> Result | None:
    kind = type(result) if isinstance(result, (list, tuple)) else None
    given = [result] if kind is None else list(result)
    parts: list[ResultTensor | int | float | None] = []
    for part in given:
        if part is None or type(part) in NUMBERS:
            parts.append(part)
            continue
        if type(part) is not FakeTensor or part.constant is not None:
            return None
        made = _made_of(mode, operands, part)
        if made is None or not _is_alike(_make(mode, made, operands), part):
            return None
        parts.append(made)
    new = [part.untyped_storage()._cdata for part, made in zip(given, parts, strict=True) if _is_new(made)]
    if len(set(new)) < len(new):
        # Tensors that share what none has had before.
        return None
    return Result(tuple(parts), kind)


def _is_new(part: ResultTensor | int | float | None) -> bool:
    return isinstance(part, ResultTensor) and part.operand is None


def _views_of(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, operand: Any) -> Result:
    """The views that an operator returns of its operand, computed by PyTorch's C++ code without fake
    tensors."""
    shape, stride, offset = operand.shape, operand.stride(), operand.storage_offset()
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    size = max(last + 1, operand.untyped_storage().nbytes() // operand.element_size())
    with torch._C._DisableTorchDispatch():
        memory = torch.empty_strided((size,), (1,), dtype=operand.dtype, device="meta")
        plain = memory.as_strided(shape, stride, offset)
        shown = func(*(plain if arg is operand else arg for arg in args), **kwargs)
    kind = type(shown) if isinstance(shown, (list, tuple)) else None
    parts = [
        ResultTensor(
            operand=0,
            is_operand=False,
            shape=tuple(view.shape),
            stride=view.stride(),
            offset=view.storage_offset(),
            dtype=view.dtype,
            device=operand.fake_device,
            backend=kernel_device(operand.fake_device),
            attributes=_attributes(mode, operand.fake_device),
        )
        for view in ([shown] if kind is None else shown)
    ]
    return Result(tuple(parts), kind)


def _attributes(mode: FakeTensorMode, device: torch.device) -> dict[str, Any]:
    """Attributes of a new fake tensor, except its mode and its device, whose name differs between
    versions."""
    with torch._C._DisableTorchDispatch():
        fresh = FakeTensor(mode, torch.empty_strided((0,), (1,), device="meta"), device)
    return {name: value for name, value in fresh.__dict__.items() if name not in FAKE_ATTRIBUTES}


def _made_of(mode: FakeTensorMode, operands: Sequence[Tensor], tensor: Any) -> ResultTensor | None:
    """The recipe to make a tensor again; None where it is not certain."""
    memory = tensor.untyped_storage()._cdata
    shown = [n for n, operand in enumerate(operands) if operand.untyped_storage()._cdata == memory]
    same = [n for n in shown if operands[n] is tensor]
    if len(same) > 1 or (shown and not same and len(operands) > 1):
        # Other operands may need another one of them.
        return None
    return ResultTensor(
        operand=next(iter(same or shown), None),
        is_operand=bool(same),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=tensor.storage_offset(),
        dtype=tensor.dtype,
        device=tensor.fake_device,
        backend=kernel_device(tensor.fake_device),
        attributes=_attributes(mode, tensor.fake_device),
    )


def _is_alike(tensor: Any, other: Any) -> bool:
    """Return whether two tensors differ only in their memory."""
    keys = [torch._C._dispatch_key_set(x) for x in (tensor, other)]
    return (
        keys[0] == keys[1]
        and all(
            getattr(tensor, name)() == getattr(other, name)()
            for name in ("size", "stride", "storage_offset", "is_conj", "is_neg")
        )
        and (tensor.dtype, tensor.fake_device, tensor.requires_grad, tensor.untyped_storage().nbytes())
        == (other.dtype, other.fake_device, other.requires_grad, other.untyped_storage().nbytes())
    )
