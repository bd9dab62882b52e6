"""A frozen base in 4 bits: the same numbers under every layout, and in what is merged and stored."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import planner
from costmodels import Layout, Lora, ModelSpec
from costmodels.catalogue import load_model
from costmodels.errors import InputError
from costmodels.layers.quantised import matrix_bytes, quantised_names, quantised_parameters
from costmodels.spec.model_parts import LORA_TARGETS
from runtime import convert
from runtime.checkpoint.tensor_store import StoredTensors
from runtime.dryrun.run import fake_process_group, trace
from runtime.model.nf4 import rounded
from runtime.parallel.mesh import build_grid
from runtime.parallel.quantised_base import BaseWeight, base_weights
from runtime.settings.checks import check_job
from runtime.train.stages import build_stage
from tests.support.hugging_face import MODELS as THEIRS
from tests.support.hugging_face import SIZES, hugging_face, skip_unless_there
from tests.support.layouts import layout_of, parse_layout
from tests.support.models import MODELS, llama
from tests.support.ranks.adapters import tuned
from tests.support.ranks.parity import difference, trained
from tests.support.worker_pool import WorkerPool

LORA = Lora(rank=4, alpha=6.0, quantize_base="nf4")

WIDE = llama("quantised", layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=250, seq=32)
"""A model whose gates have a group of scales that two tensor-parallel ranks share."""


def quantised(spec: ModelSpec, targets: tuple[str, ...] = LORA_TARGETS, **changes: Any) -> ModelSpec:
    lora = LORA.model_dump() | {"targets": targets}
    return ModelSpec.model_validate({**spec.model_dump(), **changes, "lora": lora})


LATENT = MODELS["deepseek"].model_copy(
    update={
        "hidden": 128,
        "shared_expert_ffn": 128,
        "ffn": 256,
        "latent_attention": MODELS["deepseek"].latent_attention.model_copy(  # type: ignore[union-attr]
            update={"v_head_dim": 32}
        ),
    }
)
GPT = MODELS["gpt2"].model_copy(update={"hidden": 128, "head_dim": 32, "ffn": 512})


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("spec", "layouts"),
    [
        (
            quantised(WIDE),
            [
                "tp=2,sp=1,pp=2,vpp=2",
                "tp=2,recompute=full",
                "dp=2,zero=1,mbs=2",
                "dp=2,zero=3,recompute=selective,recompute_modules=mlp",
                "cp=2,cp_form=ring",
            ],
        ),
        (quantised(WIDE, kv_heads=1), ["tp=2"]),
        (quantised(GPT), ["tp=2", "pp=2"]),
        (quantised(WIDE, layers=2, targets=("query", "down")), ["tp=2,sp=1,recompute=full"]),
        (quantised(LATENT), ["tp=2,sp=1,ep=2", "dp=2,zero=3,ep=2"]),
    ],
)
def test_every_layout_trains_beside_the_same_base(
    pool: WorkerPool, spec: ModelSpec, layouts: list[str]
) -> None:
    [alone] = pool.run(trained, 1, spec, parse_layout("gbs=4", spec), 4)
    assert spec.lora is not None
    in_16_bits = spec.model_copy(update={"lora": spec.lora.model_copy(update={"quantize_base": None})})
    [wide] = pool.run(trained, 1, in_16_bits, parse_layout("gbs=4", spec), 4)
    assert difference([wide], alone).losses > 1e-4
    for text in layouts:
        layout = parse_layout(f"gbs=4,{text}", spec)
        found = difference(pool.run(trained, layout.world_size, spec, layout, 4), alone)
        assert found.largest < 1e-5, text


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("tp=2,sp=1,recompute=selective,recompute_modules=mlp;norm", "inductor"),
        # The same functions of single operators: a C++ compiler takes most of the time of the others.
        ("recompute=full", "aot_eager"),
    ],
)
def test_compiled_layers_train_beside_the_same_base(pool: WorkerPool, text: str, backend: str) -> None:
    spec = quantised(WIDE, layers=2, targets=("query", "value"))
    [alone] = pool.run(trained, 1, spec, parse_layout("gbs=4", spec), 2)
    layout = parse_layout(f"gbs=4,{text}", spec)
    assert (
        difference(pool.run(trained, layout.world_size, spec, layout, 2, True, backend), alone).largest < 1e-5
    )


@pytest.mark.ranks
def test_merged_weights_are_those_of_the_base_in_4_bits_and_adapters(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_there("mistral")
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8}
    monkeypatch.setitem(THEIRS, "wide", ("mistral", sizes | {"sliding_window": None}))
    model, spec = hugging_face("wide", tmp_path / "hf")
    model.save_pretrained(tmp_path / "hf")
    convert.from_hugging_face(tmp_path / "hf", tmp_path / "base")
    spec = quantised(spec, seq=16)
    one, base, folder = layout_of(spec, global_batch_size=4), tmp_path / "base", tmp_path / "tuned"
    [whole] = pool.run(tuned, 1, spec, one, base, tmp_path / "whole", [4])
    first = pool.run(tuned, 1, spec, one, base, folder, [2])[0]
    for text in ("tp=2,sp=1", "pp=2", "dp=2,zero=3"):
        split = parse_layout(f"gbs=4,{text}", spec)
        shutil.rmtree(folder / "iter_0000004", ignore_errors=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
        again = pool.run(tuned, 2, spec, split, base, folder, [4])[0]
        np.testing.assert_allclose(first + again, whole, rtol=1e-5, err_msg=text)
    assert all("lora_" in name for name in StoredTensors(folder / "iter_0000002").wholes)
    convert.to_hugging_face(folder, tmp_path / "merged")
    convert.to_peft(folder, tmp_path / "adapter")
    before, after = (
        load_file(tmp_path / "hf/model.safetensors"),
        load_file(tmp_path / "merged/model.safetensors"),
    )
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    changed = 0
    for name, tensor in after.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" not in adapter:
            assert torch.equal(tensor, before[name]), name
            continue
        added = adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"] * LORA.scale
        torch.testing.assert_close(tensor, rounded(before[name]) + added, rtol=0, atol=1e-6, msg=name)
        changed += 1
    assert changed == 7 * spec.layers == len(quantised_names(spec))
    with pytest.raises(Exception, match=r"is of another model .*quantize_base='nf4'"):
        plain = spec.model_copy(update={"lora": LORA.model_copy(update={"quantize_base": None})})
        pool.run(tuned, 1, plain, one, base, folder, [5])


def test_a_split_of_blocks_is_refused_by_name() -> None:
    spec = quantised(WIDE)
    with pytest.raises(InputError, match="tensor_parallel 4 splits matrices with 128 inputs"):
        check_job(spec, parse_layout("tp=4,gbs=4", spec.model_copy(update={"kv_heads": 4})), 4)


def test_only_matrices_of_layers_are_in_4_bits() -> None:
    spec = quantised(WIDE)
    with fake_process_group(1, 0):
        layout = layout_of(spec)
        grid = build_grid(spec, layout, torch.device("cpu"))
        found = dict(base_weights(build_stage(spec, layout, grid, 0, compiled=False)))
    assert found.keys() == quantised_names(spec)
    # No memory before a stage has its device.
    assert all(buffer.is_meta for one in found.values() for buffer in one.buffers())
    total = sum(one.outputs * one.inputs for one in found.values())
    assert total == quantised_parameters(spec)
    held = sum(one.codes.nbytes + one.scales.nbytes + one.factors.nbytes for one in found.values())
    assert held == sum(matrix_bytes(one.inputs, one.outputs) for one in found.values())
    assert not any(name.endswith(("embedding.tokens.weight", "head.weight")) for name in found)


@pytest.mark.parametrize("rows", [700, 1024])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_share_the_scales_of_groups_that_lie_on_both(
    rows: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the second rank begin in a group of 256 that is not the first one."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(rows, 64, generator=draw) * torch.rand(rows, 1, generator=draw)
    of_rows = whole.abs().amax(1, keepdim=True)
    half = rows // 2
    other = of_rows.clone()
    other[rank * half : (rank + 1) * half] = 0.0

    def all_reduce(x: torch.Tensor, operation: Any, group: Any) -> None:
        assert operation == dist.ReduceOp.MAX
        groups = [part.max() for part in other.split(256)]
        x.copy_(torch.maximum(x, torch.stack(groups).unsqueeze(1)))

    with fake_process_group(2, rank):
        mesh = init_device_mesh("cpu", (2,))
        part = whole.chunk(2)[rank]
        parameter = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        weight = BaseWeight(parameter, torch.float32, None)
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        weight.take(part)
    assert torch.equal(weight.dense(), rounded(whole)[rank * half : (rank + 1) * half])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"recompute": "full"},
        {"data_parallel": 2, "zero_stage": 3},
        {"tensor_parallel": 2, "sequence_parallel": True},
    ],
)
def test_the_range_of_memory_holds_that_of_a_trace(fields: dict[str, Any]) -> None:
    """Priced are compiled layers: no schedule of adapters runs others, but --no-compile (10 % more) does."""
    spec = quantised(load_model("llama3-8b"), layers=8, seq=2048, lora=None)
    layout = Layout.model_validate({"layers_per_stage": (8,), "global_batch_size": 2} | fields)
    traced = trace(spec, layout, compiled=True).peak.total
    found = planner.evaluate(layout, model=spec, device="h100").memory[0]
    planned = found.total - found.doubt - found.reserve - found.context - found.communicators
    assert found.doubt < 0.05 * planned
    assert planned - found.doubt <= traced <= planned + found.doubt
