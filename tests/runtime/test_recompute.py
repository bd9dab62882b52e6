"""Recomputation keeps the inputs that it needs, and changes no gradient."""

from __future__ import annotations

import weakref
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from costmodels import Layout, ModelSpec
from runtime.model.transformer import Transformer
from runtime.parallel import recomputation as again
from runtime.parallel.initialisation import initialise
from runtime.parallel.recomputation import recompute
from tests.support.layouts import parse_layout
from tests.support.models import DENSE, KINDS, MODELS
from tests.support.ranks.parity import losses_of, relative_difference
from tests.support.ranks.recompute import BATCH, kept, kept_on_rank
from tests.support.worker_pool import WorkerPool

MODULE_SETS = [
    ("core_attention",),
    ("mlp",),
    ("norm",),
    ("activation",),
    ("norm", "activation"),
    ("norm", "mlp"),
    ("mlp", "activation"),
    ("core_attention", "mlp", "norm", "activation"),
]
SELECTIVE = [f"recompute=selective,recompute_modules={';'.join(modules)}" for modules in MODULE_SETS]
FULL = [
    "recompute=full",
    "recompute=full,recompute_num_layers=2",
    "recompute=full,recompute_num_layers=3",
    "recompute=full,recompute_method=block,recompute_num_layers=1",
]
BLOCK = "recompute=selective,recompute_modules=norm;mlp,recompute_method=block,recompute_num_layers=1"
EVERY = [*SELECTIVE, *FULL, BLOCK]


def built(spec: ModelSpec, layout: Layout | None) -> Transformer:
    model = Transformer(spec, spec.padded_vocab(1))
    initialise(model, spec, seed=1, std=0.3)
    model.place(torch.arange(spec.seq))
    if layout is not None:
        recompute(model, layout)
    return model


def tokens(spec: ModelSpec) -> Tensor:
    return torch.randint(0, spec.vocab, (BATCH, spec.seq), generator=torch.Generator().manual_seed(3))


def loss_of(model: Transformer, spec: ModelSpec) -> Tensor:
    ids = tokens(spec)
    logits = model(ids)[..., : spec.vocab].flatten(0, 1)
    return F.cross_entropy(logits.float(), ids.roll(-1, 1).flatten(), reduction="sum")


def gradients(spec: ModelSpec, text: str) -> dict[str, Tensor]:
    model = built(spec, parse_layout(text, spec))
    loss_of(model, spec).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@cache
def plain_gradients(name: str) -> dict[str, Tensor]:
    """Gradients of a model that computes nothing again."""
    return gradients(MODELS[name], "")


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("text", EVERY)
def test_gradients_are_the_same_to_the_last_bit(name: str, text: str) -> None:
    spec = MODELS[name]
    plain, again = plain_gradients(name), gradients(spec, text)
    assert plain.keys() == again.keys()
    for parameter, gradient in plain.items():
        assert torch.equal(gradient, again[parameter]), parameter


@cache
def plain_loss(name: str) -> Tensor:
    return loss_of(built(MODELS[name], None), MODELS[name]).detach()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("text", ["", *EVERY])
def test_losses_without_gradients_are_the_same(name: str, text: str) -> None:
    spec = MODELS[name]
    model = built(spec, parse_layout(text, spec))
    with torch.no_grad():
        assert torch.equal(loss_of(model, spec), plain_loss(name))


def kept_per_token(spec: ModelSpec, modules: tuple[str, ...], tp: int = 1, sp: bool = False) -> float:
    """The formulas of runtime.parallel.recomputation, for fp32 on a CPU."""
    e, h, f, part = 4, spec.hidden, spec.ffn / tp, tp if sp else 1
    statistics = (8 if spec.norm == "layernorm" else 4 + 4 * h) / part
    inputs, outputs = 2 * e * h / part, 2.0 * e * h
    if "mlp" in modules:
        outputs = e * h + e * h / part
    attention = e * (2 * spec.q_size + 2 * spec.kv_size) / tp + 4 * spec.heads / tp
    kept = inputs + outputs + 2 * statistics + attention
    if "core_attention" in modules:
        kept -= 4 * spec.heads / tp
    if "norm" in modules:
        kept -= outputs + 2 * statistics
    if "mlp" not in modules:
        kept += e * f * (4 if spec.gated else 2)
        if "activation" in modules:
            kept -= e * f * (2 if spec.gated else 1)
    return kept


def measured(spec: ModelSpec, text: str, layers: int = 1) -> float:
    """Bytes per token that stay after the forward pass of `layers` layers, their output included."""
    small = spec.model_copy(update={"layers": layers})
    model = built(small, parse_layout(text, small))
    forward, after = kept(model, torch.randn(BATCH, spec.seq, spec.hidden, requires_grad=True))
    assert after == 0
    return forward


@pytest.mark.parametrize("name", DENSE)
def test_a_layer_keeps_what_the_formulas_say(name: str) -> None:
    spec = MODELS[name]
    assert measured(spec, "") == kept_per_token(spec, ())
    for modules, text in zip(MODULE_SETS, SELECTIVE, strict=True):
        assert measured(spec, text) == kept_per_token(spec, modules), modules


@pytest.mark.parametrize("name", DENSE)
def test_full_recomputation_keeps_one_input_for_every_unit(name: str) -> None:
    spec = MODELS[name]
    one, all_of_it = 4 * spec.hidden, kept_per_token(spec, ())
    assert measured(spec, "recompute=full", layers=4) == 4 * one
    assert measured(spec, "recompute=full,recompute_num_layers=2", layers=4) == 2 * one
    assert measured(spec, "recompute=full,recompute_num_layers=3", layers=4) == 2 * one
    text = "recompute=full,recompute_method=block,recompute_num_layers=1"
    assert measured(spec, text, layers=4) == one + 3 * all_of_it
    assert measured(spec, BLOCK, layers=4) == kept_per_token(spec, ("norm", "mlp")) + 3 * all_of_it


@pytest.mark.parametrize("sp", [0, 1])
def test_two_tensor_parallel_ranks_keep_what_the_formulas_say(sp: int, pool: WorkerPool) -> None:
    for name, modules in (("llama", ()), ("gpt2", ("norm", "activation")), ("llama", ("norm", "mlp"))):
        spec = MODELS[name].model_copy(update={"layers": 1})
        text = f"tp=2,sp={sp}"
        if modules:
            text += f",recompute=selective,recompute_modules={';'.join(modules)}"
        expected = kept_per_token(spec, modules, tp=2, sp=bool(sp))
        ranks = pool.run(kept_on_rank, 2, spec, parse_layout(text, spec), expected)
        assert ranks == [expected] * 2, text


def counted_forwards(model: Transformer) -> Counter[str]:
    """Counts how often each linear and norm runs from now on."""
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm)):
            forward = module.forward

            def counting(x: Tensor, name: str = name, forward: Any = forward) -> Tensor:
                calls[name] += 1
                result: Tensor = forward(x)
                return result

            module.forward = counting  # type: ignore[method-assign]
    return calls


def split_backward(text: str, spec: ModelSpec) -> tuple[list[Tensor], Counter[str]]:
    """Gradients of the input and of the weights, made apart as zero-bubble schedules do; what ran there."""
    model = built(spec, None)
    calls = counted_forwards(model)
    recompute(model, parse_layout(text, spec))
    x = torch.randn(BATCH, spec.seq, spec.hidden, generator=torch.Generator().manual_seed(4)).requires_grad_()
    weights = [p for block in model.blocks for p in block.parameters()]
    output = model.run_layers(x)
    calls.clear()
    (gradient,), groups = stage_backward_input([output], [torch.ones_like(output)], [x], iter(weights))
    assert gradient is not None
    stage_backward_weight(iter(weights), groups)
    return [gradient, *(weight.grad for weight in weights if weight.grad is not None)], calls


@cache
def plain_split_backward(spec: ModelSpec) -> list[Tensor]:
    """The result of `split_backward` where nothing is computed again."""
    found, calls = split_backward("", spec)
    assert not calls
    assert len(found) == 1 + sum(1 for block in built(spec, None).blocks for _ in block.parameters())
    return found


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("text", EVERY)
def test_a_split_backward_gives_the_same_gradients(name: str, text: str) -> None:
    spec = MODELS[name].model_copy(update={"layers": 2})
    again, _ = split_backward(text, spec)
    assert all(torch.equal(one, other) for one, other in zip(plain_split_backward(spec), again, strict=True))


@pytest.mark.parametrize("name", list(MODELS))
def test_each_part_of_a_split_backward_computes_once(name: str) -> None:
    spec = MODELS[name].model_copy(update={"layers": 2})
    _, calls = split_backward("recompute=full", spec)
    for matrix, times in calls.items():
        assert times == 2, matrix
    _, calls = split_backward("recompute=selective,recompute_modules=norm;activation", spec)
    # The weights of a norm need its statistics, and those of the matrices after it its output.
    assert calls
    assert max(calls.values()) <= 3


@pytest.mark.parametrize("text", ["recompute=full", SELECTIVE[1], SELECTIVE[4]])
def test_a_split_backward_holds_what_it_computes_again_for_one_layer(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repetitions: list[Any] = []
    held: list[int] = []
    run_again = again._Call._run_again

    def watched(call: Any, with_internals: bool) -> None:
        run_again(call, with_internals)
        repetitions.append(weakref.ref(call))
        calls = {id(c): c for c in (reference() for reference in repetitions) if c is not None}
        tensors = {t.data_ptr(): t.nbytes for c in calls.values() for t in c.internals.values()}
        held.append(sum(tensors.values()))

    monkeypatch.setattr(again._Call, "_run_again", watched)
    peaks = []
    for layers in (2, 6):
        held.clear()
        split_backward(text, MODELS["llama"].model_copy(update={"layers": layers}))
        peaks.append(max(held))
    # The model's parameters are among the tensors of a layer, once.
    assert peaks[1] <= 1.01 * peaks[0]


@pytest.mark.parametrize("name", list(MODELS))
def test_backward_computes_again_once(name: str) -> None:
    spec = MODELS[name].model_copy(update={"layers": 2})
    for text in EVERY:
        model = built(spec, None)
        calls = counted_forwards(model)
        recompute(model, parse_layout(text, spec))
        output = model.run_layers(torch.randn(BATCH, spec.seq, spec.hidden, requires_grad=True))
        calls.clear()
        output.sum().backward()  # type: ignore[no-untyped-call]
        assert set(calls.values()) <= {1}, text


@pytest.mark.slow
@pytest.mark.parametrize("text", [SELECTIVE[-1], FULL[0], FULL[1]])
def test_compiled_layers_give_the_same_gradients(text: str) -> None:
    spec = MODELS["llama"].model_copy(update={"layers": 2})
    plain = gradients(spec, "")
    model = built(spec, parse_layout(text, spec))
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
    loss_of(model, spec).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_layouts_that_recompute_have_the_same_losses(name: str, pool: WorkerPool) -> None:
    spec = MODELS[name]
    reference = pool.run(losses_of, 1, spec, parse_layout("", spec), 3)[0]
    for text in (
        f"tp=2,sp=1,{SELECTIVE[4]}",
        f"dp=2,zero=3,{FULL[1]}",
        f"dp=2,zero=3,{SELECTIVE[-1]}",
        f"pp=2,schedule=zbv,{FULL[0]}",
    ):
        layout = parse_layout(text, spec)
        losses = pool.run(losses_of, layout.world_size, spec, layout, 3)[0]
        assert relative_difference(losses, reference) < 1e-6, text


def test_an_output_is_let_go_with_its_last_view() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    call = again._Call(lambda x: x.exp().sin(), (x,))
    result = call.run(x)
    whole, turned = (call.pack_output(view) for view in (result, result.t()))
    # A backward that is split asks twice.
    for _ in range(2):
        assert torch.equal(again.unpack(whole), result) and call.output is not None
        assert torch.equal(again.unpack(turned), result.t()) and call.output is None
