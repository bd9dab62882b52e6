"""Compilers give every autograd Function of the runtime the gradients of eager code."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from runtime.model import delta_rule, fused_attention, nf4, routing
from runtime.model.experts import MixtureOfExperts
from runtime.model.reach import Reach
from runtime.parallel import loss, summing_experts
from runtime.parallel.mxfp8 import mxfp8_linear
from runtime.parallel.summing_linear import Place, summing_linear
from runtime.train import balance
from tests.support.autograd_functions import Case, compiled_difference, drawn, functions_of_the_runtime
from tests.support.models import llama
from tests.support.ranks.collectives import compiled_differences
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.oldest

DTYPES = (torch.float32, torch.bfloat16)

SAME = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
"""Relative differences of the same operations: one rounding, where a compiler drops or adds a cast."""

ORDER = torch.tensor([3, 0, 5, 1, 4, 2])
COUNTS = torch.tensor([2, 0, 4])
PAIRS = routing.Assignment(ORDER, COUNTS, ORDER.argsort())


def _nf4(dtype: torch.dtype) -> Case:
    weight = nf4.NF4Weight(48, 64, dtype)
    weight.fill(drawn(48, 64))
    return Case(lambda x: nf4._Product.apply(x, weight, None), (drawn(5, 64).to(dtype),))


def _float8(dtype: torch.dtype) -> Case:
    pytest.importorskip("torchao")
    from runtime.parallel.float8_tensorwise import tensorwise_linear

    return Case(tensorwise_linear, (drawn(5, 32).to(dtype), drawn(48, 32, seed=1).to(dtype)))


def _gated(dtype: torch.dtype) -> Case:
    pytest.importorskip("torchao")
    from runtime.parallel.float8_bounds import _Gated

    up, gate, slot = drawn(5, 32), drawn(5, 32, seed=1), torch.zeros((), requires_grad=True)
    largest = up.abs().amax(), gate.abs().amax()
    return Case(
        lambda up, gate: _Gated.apply("silu", up, slot, gate, slot, *largest), (up.to(dtype), gate.to(dtype))
    )


def _attention(dtype: torch.dtype, reach: Reach, *more: Tensor) -> Case:
    heads = tuple(drawn(2, heads, 12, 16, seed=heads).to(dtype) for heads in (4, 2))
    inputs = heads[0], heads[1], 2 * heads[1], *more
    return Case(lambda q, k, v, *sinks: fused_attention.reaching_attention(q, k, v, reach, *sinks), inputs)


def _handed_over(dtype: torch.dtype) -> Case:
    """A gradient that is there already; backward writes over it, so that each call needs another one."""
    value, gradient = torch.tensor(1.5), drawn(5, 8, seed=1).to(dtype)
    return Case(lambda x: loss._HandOver.apply(x, value, gradient + 0), (drawn(5, 8).to(dtype),))


def _summing(dtype: torch.dtype) -> Case:
    """A case without the weight, which gets no gradient from autograd."""
    linear = nn.Linear(32, 48, dtype=dtype)
    sum_NK = torch.zeros(48, 32)
    place = Place(linear, sum_NK.device, lambda: (sum_NK, True))
    return Case(
        lambda x, bias: summing_linear(x, linear.weight.detach(), bias, place.tensor),
        (drawn(5, 32).to(dtype), drawn(48, seed=1).to(dtype)),
    )


def _summing_experts(dtype: torch.dtype) -> Case:
    """A case without the weights, which get no gradient from autograd; in bf16, as grouped GEMMs compile."""
    sum_EOI, weight_EOI = torch.zeros(3, 16, 8), drawn(3, 16, 8, seed=1).bfloat16()
    place = Place(nn.Module(), sum_EOI.device, lambda: (sum_EOI, True))
    ends_E = COUNTS.cumsum(0, dtype=torch.int32)
    return Case(
        lambda x: summing_experts._Product.apply(x.bfloat16(), weight_EOI, ends_E, place.tensor),
        (drawn(6, 8).to(dtype),),
    )


FUNCTIONS: dict[str, Callable[[torch.dtype], Case]] = {
    "model.routing._Permute": lambda dtype: Case(
        lambda x: routing.permute(x, ORDER, 2), (drawn(3, 8).to(dtype),)
    ),
    "model.routing._Combine": lambda dtype: Case(
        lambda rows, weights: routing.combine(rows, weights, PAIRS),
        (drawn(6, 8).to(dtype), drawn(3, 2, seed=1)),
    ),
    "model.routing._Spread": lambda dtype: Case(
        lambda x: routing.spread(x, ORDER, 8), (drawn(6, 8).to(dtype),)
    ),
    "model.routing._UsedOnly": lambda dtype: Case(
        lambda x: routing._UsedOnly.apply(x, COUNTS), (drawn(3, 4, 8).to(dtype),)
    ),
    "model.routing._WideProduct": lambda dtype: Case(
        routing._WideProduct.apply, (drawn(2, 5, 8).to(dtype), drawn(4, 8, seed=1).to(dtype))
    ),
    "model.nf4._Product": _nf4,
    "model.delta_rule._Inverse": lambda dtype: Case(delta_rule._Inverse.apply, (drawn(2, 5, 5),)),
    "model.fused_attention._Reaching": lambda dtype: _attention(dtype, Reach(window=5), drawn(4, seed=3)),
    "model.capped_attention._Capped": lambda dtype: _attention(dtype, Reach(window=5, softcap=2.0)),
    "parallel.float8_tensorwise._Product": _float8,
    "parallel.float8_bounds._Gated": _gated,
    "parallel.mxfp8._Product": lambda dtype: Case(
        mxfp8_linear, (drawn(5, 32).to(dtype), drawn(64, 32, seed=1).to(dtype))
    ),
    "parallel.loss._HandOver": _handed_over,
    "parallel.summing_experts._Product": _summing_experts,
    "parallel.summing_linear._Product": _summing,
    "train.balance._AddToObjective": lambda dtype: Case(
        lambda w, o: balance._AddToObjective.apply(w, o, torch.tensor(0.5)), (drawn(2, 5).to(dtype), drawn())
    ),
}
"""One of each, by module and name."""

OF_RANKS = Counter(
    {
        "parallel.collectives._conjugates.<locals>.Collective": 7,
        "parallel.context_attention._GatherPrefixes": 1,
    }
)
"""Cases of collectives: how many there are of each."""

OUTSIDE = {
    "parallel.collectives._Start": "experts whose rows travel between ranks stay outside of graphs",
    "parallel.collectives._Finish": "the same",
    "parallel.layer_chain._Chain": "runs what was compiled (`test_layer_chain`)",
    "parallel.recomputation._Inputs": "compiled layers compute again by PyTorch's checkpoints",
    "parallel.ring_attention._RingAttention": "layers that ring are compiled in two, before and after",
    "dryrun.kernels._GroupedProduct": "stands for CPU kernels, of tensors without memory",
    "dryrun.kernels._FusedRmsNorm": "the same of CUDA's; not used while something compiles",
}
"""Autograd functions that no compiler sees, and why."""


def test_every_function_has_a_case() -> None:
    found = {name.removeprefix("runtime."): count for name, count in functions_of_the_runtime().items()}
    assert found == {**dict.fromkeys([*FUNCTIONS, *OUTSIDE], 1), **OF_RANKS}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_a_traced_function_are_those_of_eager_code(name: str, dtype: torch.dtype) -> None:
    assert compiled_difference(FUNCTIONS[name](dtype), "aot_eager") <= SAME[dtype]


@pytest.mark.slow
def test_gradients_of_traced_collectives_are_those_of_eager_code(pool: WorkerPool) -> None:
    for found in pool.run(compiled_differences, 2, DTYPES):
        assert {of: difference for of, difference in found.items() if difference > SAME[of[1]]} == {}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_experts_get_the_gradients_of_eager_ones() -> None:
    experts = MixtureOfExperts(
        llama("experts", layers=1, hidden=64, heads=4, ffn=96, vocab=64, seq=32).model_copy(
            update={"experts": 8, "top_k": 2, "expert_ffn": 96}
        )
    )
    for number, parameter in enumerate(experts.parameters()):
        parameter.data = 0.05 * drawn(*parameter.shape, seed=number).bfloat16()
    names, weights = zip(*experts.named_parameters(), strict=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(experts, dict(zip(names, weights, strict=True)), (x,))
        return result

    case = Case(run, (drawn(2, 32, 64).bfloat16(), *weights))
    assert compiled_difference(case, "inductor") <= 0.02
