"""Activations leave for host memory, and change no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from costmodels import ModelSpec
from runtime.model.transformer import Transformer
from runtime.parallel import offload
from runtime.parallel.initialisation import initialise
from runtime.parallel.offload import offload_activations
from runtime.parallel.recomputation import recompute
from tests.support.layouts import parse_layout
from tests.support.models import DENSE, KINDS, MODELS
from tests.support.ranks.parity import losses_of, relative_difference
from tests.support.ranks.recompute import BATCH, bytes_that_leave, kept
from tests.support.worker_pool import WorkerPool

RECOMPUTED = [
    "",
    "recompute=selective",
    "recompute=selective,recompute_modules=norm;mlp",
    "recompute=selective,recompute_modules=norm;activation;core_attention",
    "recompute=full,recompute_method=block,recompute_num_layers=2",
]


def built(spec: ModelSpec, text: str) -> Transformer:
    layout = parse_layout(text, spec)
    model = Transformer(spec, spec.padded_vocab(1))
    initialise(model, spec, seed=1, std=0.3)
    model.place(torch.arange(spec.seq))
    recompute(model, layout)
    if layout.offload_activations:
        offload_activations(model, layout)
    return model


def loss_of(model: Transformer, spec: ModelSpec, seed: int = 3) -> Tensor:
    ids = torch.randint(0, spec.vocab, (BATCH, spec.seq), generator=torch.Generator().manual_seed(seed))
    logits = model(ids)[..., : spec.vocab].flatten(0, 1)
    return F.cross_entropy(logits.float(), ids.roll(-1, 1).flatten(), reduction="sum")


def gradients(model: Transformer) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Copies:
    """Bytes of every storage that leaves, and how often one comes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: list[int] = []
        self.sources: set[int] = set()
        self.back = 0
        counts = self

        class Counted(offload._Copy):
            def __init__(self, storage: torch.UntypedStorage, transfers: Any) -> None:
                super().__init__(storage, transfers)
                counts.left.append(storage.nbytes())
                counts.sources.add(storage.data_ptr())

            def fetch(self) -> None:
                counts.back += self.memory is None
                super().fetch()

        monkeypatch.setattr(offload, "_Copy", Counted)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("text", RECOMPUTED)
def test_gradients_are_the_same_to_the_last_bit(name: str, text: str, copies: Copies) -> None:
    spec = MODELS[name]
    plain, away = built(spec, ""), built(spec, f"{text},offload_activations=1")
    for model in (plain, away):
        # Two microbatches are alive at once, as in a pipeline.
        first, second = loss_of(model, spec, 3), loss_of(model, spec, 4)
        first.backward()  # type: ignore[no-untyped-call]
        second.backward()  # type: ignore[no-untyped-call]
    expected, found = gradients(plain), gradients(away)
    assert all(torch.equal(gradient, found[parameter]) for parameter, gradient in expected.items())
    assert copies.left
    assert copies.back == len(copies.left)


@pytest.mark.parametrize("name", DENSE)
def test_inputs_queries_keys_values_and_outputs_leave_once(name: str, copies: Copies) -> None:
    spec = MODELS[name]
    away = built(spec, "offload_activations=1")
    loss = loss_of(away, spec)
    token = 4 * BATCH * spec.seq
    once = sorted(token * size for size in (spec.hidden, *[spec.q_size] * 2, *[spec.kv_size] * 2))
    assert sorted(copies.left) == sorted(once * (spec.layers - 1)), "the last layer stays"
    assert not copies.sources & {p.untyped_storage().data_ptr() for p in away.parameters()}
    assert copies.back == 0
    loss.backward()  # type: ignore[no-untyped-call]
    assert copies.back == len(copies.left)


def test_norms_that_are_recomputed_stay_out_of_host_memory(copies: Copies) -> None:
    spec = MODELS["llama"]
    loss_of(built(spec, "recompute=selective,recompute_modules=norm,offload_activations=1"), spec)
    token = 4 * BATCH * spec.seq
    assert sorted(copies.left) == sorted(
        [token * size for size in (*[spec.q_size] * 2, *[spec.kv_size] * 2)] * (spec.layers - 1)
    )


def test_nothing_leaves_without_gradients_or_from_layers_that_are_recomputed_whole(copies: Copies) -> None:
    spec = MODELS["gpt2"]
    with torch.no_grad():
        loss_of(built(spec, "offload_activations=1"), spec)
    whole = "recompute=full,recompute_method=block,recompute_num_layers=4,offload_activations=1"
    loss_of(built(spec, whole), spec)
    assert not copies.left


def test_attention_that_offloads_has_one_class_by_which_compilers_know_it() -> None:
    """Compilers need not stop in other layers, nor start anew in each of these."""
    whole = "recompute=full,recompute_method=block,recompute_num_layers=1,offload_activations=1"
    first, *others = [type(block.attention) for block in built(MODELS["llama"], whole).blocks]
    assert len(others) > 1 and len({*others}) == 1
    assert issubclass(others[0], first) and others[0] is not first


def test_a_graph_that_is_kept_fetches_again(copies: Copies) -> None:
    spec = MODELS["llama"]
    x = torch.randn(BATCH, spec.seq, spec.hidden, requires_grad=True)
    output = built(spec, "offload_activations=1").run_layers(x)
    gradients = [torch.autograd.grad(output.sum(), x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(gradients[0], gradients[1])
    assert copies.back == 2 * len(copies.left)


def test_a_layer_fetches_the_one_before_it_while_it_runs(copies: Copies) -> None:
    spec = MODELS["llama"]
    away = built(spec, "offload_activations=1")
    loss = loss_of(away, spec)
    fetched: list[int] = []
    for block in reversed(away.blocks):
        block.get_parameter("attention.query.weight").register_hook(lambda _: fetched.append(copies.back))
    loss.backward()  # type: ignore[no-untyped-call]
    layer = len(copies.left) // (spec.layers - 1)
    assert fetched == [layer, 2 * layer, 3 * layer, 3 * layer]


def test_host_memory_is_freed_with_the_graph() -> None:
    spec = MODELS["llama"]
    away = built(spec, "offload_activations=1")
    forward, after = kept(away, torch.randn(BATCH, spec.seq, spec.hidden, requires_grad=True))
    assert forward > 0
    assert after == 0


@pytest.mark.parametrize("name", KINDS)
def test_layouts_that_offload_have_the_same_losses(name: str, pool: WorkerPool) -> None:
    spec = MODELS[name]
    reference = pool.run(losses_of, 1, spec, parse_layout("", spec), 3)[0]
    for text in (
        "tp=2,sp=1,recompute=selective,recompute_modules=norm",
        "dp=2,zero=3,recompute=selective",
        "pp=2,schedule=zbv",
    ):
        layout = parse_layout(f"{text},offload_activations=1", spec)
        losses = pool.run(losses_of, layout.world_size, spec, layout, 3)[0]
        assert relative_difference(losses, reference) < 1e-6, text


def test_gathered_parameters_stay(pool: WorkerPool) -> None:
    spec = MODELS["llama"]
    for text in ("dp=2,zero=3", "tp=2,dp=2,zero=3"):
        layout = parse_layout(f"{text},offload_activations=1", spec)
        width = layout.tensor_parallel
        token = 4 * spec.seq
        sizes = [spec.hidden, *[spec.q_size // width] * 2, *[spec.kv_size // width] * 2]
        expected = sorted([token * size for size in sizes] * (spec.layers - 1))
        for left in pool.run(bytes_that_leave, layout.world_size, spec, layout):
            assert sorted(left) == expected, text
