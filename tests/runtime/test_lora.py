"""Low-rank adapters: every layout trains them alike, and as peft does; their checkpoints and exports."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from costmodels import Lora, ModelSpec
from costmodels.errors import InputError
from costmodels.layers.adapters import adapter_parameters
from runtime import checkpoint, convert
from runtime.checkpoint.tensor_store import StoredTensors
from runtime.huggingface.stored_model import open_model
from runtime.job.initial_state import check_adapters, check_loaded
from runtime.model.transformer import Transformer
from runtime.settings.training_options import OutputOptions
from tests.support.hugging_face import hugging_face, skip_unless_there
from tests.support.layouts import layout_of, parse_layout
from tests.support.models import MODELS
from tests.support.ranks.adapters import OPTIONS, tuned
from tests.support.ranks.parity import difference, trained
from tests.support.ranks.training import batch_of
from tests.support.worker_pool import WorkerPool

LORA = Lora(rank=4, alpha=6.0)


def with_lora(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return ModelSpec.model_validate({**spec.model_dump(), **changes, "lora": LORA.model_dump()})


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "qwen", "deepseek"])
def test_adapters_are_as_many_as_are_counted(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(with_lora(MODELS[name]), 250)
    trains = [one for one in model.parameters() if one.requires_grad]
    assert sum(one.numel() for one in trains) == adapter_parameters(with_lora(MODELS[name]))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        (
            "llama",
            [
                "tp=2,sp=1,pp=2,vpp=2",
                "dp=2,zero=1,mbs=2",
                "dp=2,zero=2",
                "dp=2,zero=3,recompute=full",
                "cp=2,cp_form=ring",
            ],
        ),
        ("gpt2", ["tp=2", "pp=2"]),
        ("deepseek", ["tp=2,sp=1,ep=2", "dp=2,zero=3,ep=2"]),
    ],
)
def test_every_layout_trains_adapters_as_one_rank_does(
    pool: WorkerPool, name: str, layouts: list[str]
) -> None:
    # Fewer key/value heads than ranks of some layouts: these share a head, and the rows of its adapter.
    spec = with_lora(MODELS[name], **({"kv_heads": 1} if name == "llama" else {}))
    [alone] = pool.run(trained, 1, spec, parse_layout("gbs=4", spec), 4)
    assert len(set(alone.losses)) == 4
    for text in layouts:
        layout = parse_layout(f"gbs=4,{text}", spec)
        found = difference(pool.run(trained, layout.world_size, spec, layout, 4), alone)
        assert found.largest < 1e-5, text


@pytest.fixture
def llama(tmp_path: Path) -> ModelSpec:
    """A small Llama in the folder `hf`, and as a checkpoint in `base`."""
    return _base("mistral", tmp_path)


def _base(name: str, folder: Path) -> ModelSpec:
    skip_unless_there(name)
    model, spec = hugging_face(name, folder / "hf")
    model.save_pretrained(folder / "hf")
    convert.from_hugging_face(folder / "hf", folder / "base")
    return with_lora(spec, seq=16)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["mistral", "qwen2_moe", "deepseek_v3"])
def test_weights_after_training_are_those_of_peft(pool: WorkerPool, name: str, tmp_path: Path) -> None:
    # Routed experts are frozen, for which peft takes shared ones if it may.
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    spec = _base(name, tmp_path)
    layout = layout_of(spec, global_batch_size=4)
    pool.run(tuned, 1, spec, layout, tmp_path / "base", tmp_path / "tuned", [0, 5])
    convert.to_peft(tmp_path / "tuned", tmp_path / "start", iteration=0)
    convert.to_hugging_face(tmp_path / "tuned", tmp_path / "merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True).train()
    optimizer = torch.optim.AdamW(
        [one for one in model.parameters() if one.requires_grad],
        lr=1e-2,
        betas=(OPTIONS.adam_beta1, OPTIONS.adam_beta2),
        eps=OPTIONS.adam_eps,
        weight_decay=0.1,
    )
    for step in range(5):
        batch = torch.from_numpy(batch_of(spec, layout, step))
        logits = model(batch[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "theirs"))
    before = load_file(tmp_path / "hf/model.safetensors")
    changed = {key for key, tensor in ours.items() if not torch.equal(tensor, before[key])}
    adapters = load_file(tmp_path / "start/adapter_model.safetensors")
    assert sum(one.numel() for one in adapters.values()) == adapter_parameters(spec)
    adapted = {key.removeprefix("base_model.model.").replace(".lora_A", "") for key in adapters}
    assert changed == {key for key in adapted if "lora_B" not in key}
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=1e-5, msg=key)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gpt2", "phi3", "glm4"])
def test_exported_adapters_are_what_is_merged(pool: WorkerPool, name: str, tmp_path: Path) -> None:
    # Their matrices join several of ours, lie the other way round, or have rows in another order.
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    spec = _base(name, tmp_path)
    layout = layout_of(spec, global_batch_size=2)
    pool.run(tuned, 1, spec, layout, tmp_path / "base", tmp_path / "tuned", [2])
    convert.to_peft(tmp_path / "tuned", tmp_path / "adapter")
    convert.to_hugging_face(tmp_path / "tuned", tmp_path / "merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    for key, tensor in load_file(tmp_path / "merged/model.safetensors").items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=1e-6, msg=key)


@pytest.mark.ranks
def test_a_checkpoint_holds_adapters_and_goes_on_under_another_layout(
    pool: WorkerPool, llama: ModelSpec, tmp_path: Path
) -> None:
    base, one = tmp_path / "base", layout_of(llama, global_batch_size=4)
    [whole] = pool.run(tuned, 1, llama, one, base, tmp_path / "whole", [4])
    folder = tmp_path / "tuned"
    split = layout_of(llama, global_batch_size=4, tensor_parallel=2, precision="bf16")
    first = pool.run(tuned, 1, llama, one, base, folder, [2])[0]
    stored = {name for name in StoredTensors(folder / "iter_0000002").wholes if "exp_avg" not in name}
    assert stored and all(re.search(r"\.lora_[ab]$", name) for name in stored)
    assert checkpoint.read_run(folder / "iter_0000002").base is not None
    sharded = layout_of(llama, global_batch_size=4, data_parallel=2, zero_stage=3)
    again = pool.run(tuned, 2, llama, sharded, base, folder, [4])[0]
    np.testing.assert_allclose(first + again, whole, rtol=1e-5)
    # Frozen weights are kept in the format that computes, whatever the base is stored in.
    narrow = pool.run(tuned, 2, llama, split, base, folder, [5])[0]
    assert np.isfinite(narrow).all()
    merged = open_model(folder)
    assert merged.spec.lora is None
    for lora, message in (
        (None, r"\(--lora-rank 4 .*\), and this job trains without --lora-rank; give the same, or merge"),
        (
            LORA.model_copy(update={"quantize_base": "nf4"}),
            r"with --lora-rank 4 .* --quantize-base nf4; give",
        ),
    ):
        with pytest.raises(InputError, match=message):
            check_loaded(OutputOptions(load=str(folder)), llama.model_copy(update={"lora": lora}))
    with pytest.raises(InputError, match=r"holds no adapters, and this job trains with .*; give --finetune"):
        check_adapters(folder, merged.spec, llama)
    shutil.rmtree(base / "iter_0000000")
    with pytest.raises(InputError, match=r"holds adapters of the model in .*base.*, which is not there"):
        open_model(folder)
