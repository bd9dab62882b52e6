"""Multi-token prediction: the objective and its gradients, what is predicted, layouts like one rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from costmodels import ModelSpec
from runtime.data.boundaries import Boundaries
from runtime.model.transformer import Transformer
from runtime.train.targets import next_tokens, predicted_tokens, targets_of
from tests.support.gradients import check_gradients
from tests.support.layouts import parse_layout
from tests.support.models import FORMS
from tests.support.ranks.training import batch_of, curve_and_gradients, further_losses
from tests.support.worker_pool import WorkerPool

BATCH, STEPS = 4, 2

LAYOUTS = {
    "further": (
        "dp=4",
        "tp=2,sp=True,dp=2",
        "tp=4,sp=False",
        "pp=2,dp=2",
        "pp=4",
        "dp=4,zero=3",
        "dp=2,cp=2,zero=1",
        "ep=2,dp=4,zero=1",
        "pp=2,tp=2,sp=True,ep=2,recompute=full",
        "dp=2,zero=3,recompute=full",
        "dp=2,recompute=selective,recompute_modules=norm;mlp",
    ),
    "further-tied": (
        "pp=2,tp=2,sp=False",
        "cp=2,pp=2",
        "dp=2,zero=2,tp=2,sp=True",
        "pp=2,vpp=2,schedule=interleaved",
        "dp=2,recompute=full,recompute_num_layers=2",
        "offload_activations=True",
        "pp=2,offload_activations=True",
        "dp=2,zero=1,offload_optimizer=True",
    ),
}


def reference_losses(model: Transformer, spec: ModelSpec, batch: Tensor) -> list[Tensor]:
    """Mean losses of the next token and of those after it, by the definition; positions without are cut.

    The layers are the model's own, whatever these compute; embeddings, joins, norms and heads are not.
    """
    tokens, losses = batch[:, :-1], []
    table, head = model.get_parameter("embedding.tokens.weight"), model.get_parameter("head.weight")

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (spec.hidden,), model.get_parameter(name), spec.norm_eps)

    def loss(x: Tensor, depth: int) -> Tensor:
        logits = F.linear(x * spec.logits_scale, head)[:, :, : spec.vocab]
        kept = logits[:, : spec.seq - depth]
        return F.cross_entropy(kept.flatten(0, 1), batch[:, 1 + depth :].flatten())

    x = norm(model.run_layers(F.embedding(tokens, table) * spec.embedding_scale), "norm.weight")
    losses.append(loss(x, 0))
    for depth in range(1, spec.mtp_depths + 1):
        name = f"mtp.{depth - 1}."
        # Any token stands for those after the end: what they make of a position reaches no loss.
        ids = F.pad(batch[:, depth:], (0, depth - 1), value=3)
        embedded = norm(F.embedding(ids, table) * spec.embedding_scale, f"{name}token_norm.weight")
        both = torch.cat((embedded, norm(x, f"{name}hidden_norm.weight")), dim=-1)
        block = model.get_submodule(f"{name}block")
        x = norm(block(both @ model.get_parameter(f"{name}join.weight").T), f"{name}norm.weight")
        losses.append(loss(x, depth))
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_objective_and_gradients_are_those_of_the_definition(pool: WorkerPool, name: str) -> None:
    spec = FORMS[name]
    layout = parse_layout(f"gbs={BATCH}", spec)
    [(weights, gradients, loss, further)] = pool.run(further_losses, 1, spec, layout)
    model = Transformer(spec, spec.padded_vocab(1))
    model.load_state_dict(weights)
    model.place(torch.arange(spec.seq))
    batch = torch.from_numpy(batch_of(spec, layout, 0))
    losses = reference_losses(model, spec, batch)
    assert loss == pytest.approx(losses[0].item(), rel=1e-6)
    assert further == pytest.approx([one.item() for one in losses[1:]], rel=1e-6)
    assert spec.mtp is not None
    (losses[0] + spec.mtp.loss_factor * torch.stack(losses[1:]).mean()).backward()
    expected = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    assert expected.keys() == gradients.keys()
    check_gradients(spec, gradients, expected)


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, tuple]:
    """Losses and gradients of one rank, by model."""
    found = {}
    for name in LAYOUTS:
        layout = parse_layout(f"gbs={BATCH}", FORMS[name])
        [found[name]] = pool.run(curve_and_gradients, 1, FORMS[name], layout, STEPS)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "text"), [(name, text) for name in LAYOUTS for text in LAYOUTS[name]])
def test_layouts_train_like_one_rank(pool: WorkerPool, alone: dict[str, tuple], name: str, text: str) -> None:
    spec = FORMS[name]
    layout = parse_layout(f"{text},gbs={BATCH}", spec)
    losses, gradients = alone[name]
    by_rank = pool.run(curve_and_gradients, layout.world_size, spec, layout, STEPS)
    for curve, found in by_rank:
        assert curve == pytest.approx(losses, rel=1e-5)
        check_gradients(spec, found, gradients)
    assert set(gradients) <= {key for _, found in by_rank for key in found}


def test_targets_of_further_tokens_end_with_the_sample_and_know_hidden_ids() -> None:
    batch = torch.tensor([[5, 6, 0, 7, 8]])
    boundaries = Boundaries(eod=0, eod_mask_loss=True)
    labels = next_tokens(batch, boundaries, None)
    assert labels.tolist() == [[6, 0, ~7, 8]]
    assert targets_of(labels, torch.tensor([3, 0]), 2).tolist() == [[[8, 6], [-1, 0], [-1, ~7]]]
    assert targets_of(labels, torch.tensor([1]), 0).tolist() == [[0]]
    assert predicted_tokens(labels, 2).tolist() == [3, 2, 1]
