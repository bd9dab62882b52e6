"""Multi-token prediction: the objective and its gradients, what is predicted, layouts like one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from costmodels import ModelSpec, MultiTokenPrediction
from costmodels.catalogue import load_model
from costmodels.errors import InputError
from costmodels.spec.model_flops import flops_per_sequence
from planner import suggest
from runtime import convert
from runtime.huggingface.mapping import mapping, our_shapes
from runtime.huggingface.stored_model import StoredModel
from runtime.job.initial_state import check_loaded
from runtime.model.multi_token import with_further_losses
from runtime.model.transformer import Transformer
from runtime.parallel.documents import document_starts
from runtime.settings.checks import check_job
from runtime.settings.training_options import OutputOptions
from runtime.train.next_tokens import Batch, next_tokens, predicted_tokens, targets_of
from tests.support.gradients import check_gradients
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, LLAMA
from tests.support.multi_token import logits_by_depth
from tests.support.ranks.training import batch_of, curve_and_gradients, further_losses
from tests.support.stored_models import loss_with_loaded_weights, write_checkpoint
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
    """Mean losses of the next token and of those after it, by the definition."""
    return [
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1 + depth :].flatten())
        for depth, logits in enumerate(logits_by_depth(model, spec, batch))
    ]


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
    tokens = torch.tensor([[5, 6, 0, 7, 8]])
    starts = document_starts(tokens, 0)
    batch = Batch(tokens, next_tokens(tokens, starts, None), starts)
    assert batch.labels.tolist() == [[6, 0, ~7, 8]]
    targets = targets_of(batch, 2)
    assert targets.tolist() == [[[6, 0, ~7, 8], [0, ~7, 8, -1], [~7, 8, -1, -1]]]
    assert targets_of(batch, 0).tolist() == [[6, 0, ~7, 8]]
    assert predicted_tokens(targets).tolist() == [3, 2, 1]
    # Whole documents predict none of the tokens of the next one.
    packed = targets_of(batch._replace(is_packed=True), 2)
    assert packed.tolist() == [[[6, 0, ~7, 8], [0, ~7, ~8, -1], [~7, ~8, -1, -1]]]
    assert predicted_tokens(packed).tolist() == [3, 1, 0]


def test_weights_go_to_hugging_faces_names_and_back(tmp_path: Path) -> None:
    spec = FORMS["further"]
    model = write_checkpoint(spec, tmp_path / "ours")
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["num_nextn_predict_layers"]) == ("deepseek_v3", 2)
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    own = model.state_dict()
    # DeepSeek-V3's README_WEIGHTS.md: enorm is of the embedding, hnorm of the output of the layers before.
    for theirs_name, name in (
        ("enorm", "token_norm"),
        ("hnorm", "hidden_norm"),
        ("eh_proj", "join"),
        ("shared_head.norm", "norm"),
        ("input_layernorm", "block.attention_norm"),
        ("post_attention_layernorm", "block.mlp_norm"),
    ):
        for depth in range(2):
            stored = theirs[f"model.layers.{4 + depth}.{theirs_name}.weight"]
            assert torch.equal(stored, own[f"mtp.{depth}.{name}.weight"]), theirs_name
    assert torch.equal(theirs["model.layers.5.embed_tokens.weight"], own["embedding.tokens.weight"][:250])
    assert torch.equal(theirs["model.layers.4.shared_head.head.weight"], own["head.weight"][:250])
    done = convert.from_hugging_face(tmp_path / "hf", tmp_path / "back")
    assert done.left_out == [] and done.spec.mtp_depths == 2
    first, second = StoredModel(tmp_path / "ours"), StoredModel(tmp_path / "back")
    assert first.tensors.wholes == second.tensors.wholes
    assert all(torch.equal(first.tensors.read(name), second.tensors.read(name)) for name in first.shapes)


def test_a_head_of_its_own_is_left_out(tmp_path: Path) -> None:
    write_checkpoint(FORMS["further"], tmp_path / "ours")
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.4.shared_head.head.weight"] += 1.0
    save_file(tensors, file)
    done = convert.from_hugging_face(tmp_path / "hf", tmp_path / "back")
    assert done.spec.mtp is None and "model.layers.4.eh_proj.weight" in done.left_out


def test_an_architecture_without_such_layers_leaves_them_out(tmp_path: Path) -> None:
    write_checkpoint(
        FORMS["further-tied"].model_copy(update={"logits_scale": 1.0, "embedding_scale": 1.0}), tmp_path
    )
    done = convert.to_hugging_face(tmp_path, tmp_path / "hf")
    assert "mtp.0.join.weight" in done.left_out and len(done.left_out) == 13


@pytest.mark.ranks
def test_a_job_goes_on_from_weights_with_as_many_modules_or_fewer(pool: WorkerPool, tmp_path: Path) -> None:
    spec = FORMS["further"]
    write_checkpoint(spec, tmp_path)
    losses = {}
    for layout, depths in (("", 2), ("pp=2,tp=2", 2), ("dp=2", 1), ("dp=2", 0)):
        mtp = MultiTokenPrediction(depths=depths) if depths else None
        wanted = spec.model_copy(update={"mtp": mtp})
        split = parse_layout(f"{layout},gbs=4", wanted)
        found = pool.run(loss_with_loaded_weights, split.world_size, wanted, split, str(tmp_path))
        losses[layout, depths] = found[0]
    assert list(losses.values()) == pytest.approx([losses["", 2]] * 4, rel=1e-5)
    with pytest.raises(InputError, match=r"3: checkpoint .* has weights of 2 MTP modules"):
        check_loaded(
            OutputOptions(load=str(tmp_path)),
            spec.model_copy(update={"mtp": MultiTokenPrediction(depths=3)}),
        )


def test_backward_that_is_split_is_refused_by_search_and_runtime() -> None:
    spec = FORMS["further-tied"]
    words = "schedule zbv splits backward passes, and the losses of multi-token prediction"
    with pytest.raises(InputError, match=words):
        check_job(spec, parse_layout("schedule=zbv,gbs=8", spec), 2)
    job: dict[str, Any] = {"world_size": 2, "device": "cpu", "global_batch_size": 8}
    with pytest.raises(InputError, match=words):
        suggest(spec, pin={"schedule": "zbv"}, **job)
    assert suggest(spec, **job).model.mtp == spec.mtp


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position": "learned"}, "no learned positions"),
        ({"lora": {"rank": 2, "alpha": 4.0}}, "mtp trains all weights"),
        ({"mtp": {"depths": 40}}, "samples of more tokens than 32"),
    ],
)
def test_models_that_cannot_predict_further_say_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelSpec.model_validate(FORMS["further-tied"].model_dump() | changes)


def test_modules_cost_a_layer_a_head_and_what_joins_inputs() -> None:
    plain = LLAMA.model_copy(update={"layers": 8})
    spec = plain.model_copy(update={"mtp": MultiTokenPrediction(depths=2)})
    layer = spec.layer_parameters(spec.layer_kind(7))
    assert spec.mtp_parameters == 2 * (layer + 2 * 64 * 64 + 3 * 64)
    model = Transformer(spec, spec.vocab)
    own = sum(one.numel() for name, one in model.named_parameters() if name.startswith("mtp."))
    assert own == spec.mtp_parameters and spec.parameters == plain.parameters
    deeper = plain.model_copy(update={"layers": 10})
    more = flops_per_sequence(spec) - flops_per_sequence(deeper)
    assert more == pytest.approx(2 * 6 * 32 * (64 * 250 + 2 * 64 * 64))


def test_plans_count_time_and_memory_on_the_last_stage() -> None:
    plain = load_model("llama2-7b")
    spec = plain.model_copy(update={"mtp": MultiTokenPrediction(depths=1)})
    # Another engine's memory is of closed forms with and without them.
    job: dict[str, Any] = {
        "engine": "megatron",
        "world_size": 8,
        "device": "a100-80g",
        "global_batch_size": 16,
        "precision": "bf16",
    }
    pins = {
        "tp": 1,
        "pp": 4,
        "dp": 2,
        "zero": 0,
        "mbs": 1,
        "layers_per_stage": "8,8,8,8",
        "recompute": "none",
    }
    one, other = (suggest(model, pin=pins, **job).estimate for model in (plain, spec))
    assert other.step_time_s > one.step_time_s
    first, last = ([stage.parameters for stage in estimate.memory] for estimate in (one, other))
    assert first[:3] == last[:3] and last[3] > first[3]


def test_what_is_reported_is_the_loss_and_what_trains_is_all_of_them() -> None:
    """Depths come one after the other: each takes what the one before it made and embeds its token."""
    x, loss = torch.randn(1, 3, 2, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    modules: list[Any] = [lambda x, token, by=by: by * x + token for by in (2.0, 3.0)]
    found = with_further_losses(
        loss, x, modules, lambda ids: 10.0 * ids, lambda y, depth: depth * y.square().sum(), torch.tensor
    )
    assert found.item() == 5.0
    first = 2 * x + 10
    expected = loss + first.square().sum() + 2 * (3 * first + 20).square().sum()
    for one, other in zip(
        torch.autograd.grad(found, (loss, x)), torch.autograd.grad(expected, (loss, x)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dense", [0, 1, 4])
def test_modules_of_files_are_like_the_last_layer(dense: int) -> None:
    spec = FORMS["further"].model_copy(update={"dense_layers": dense})
    named = {part.ours for entry in mapping("deepseek_v3", spec) for part in entry.parts}
    assert named == set(our_shapes(spec))
