"""Scales of fp8 and weights that are gathered in it: asked for, priced, exported and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from costmodels import Estimate, Layout
from costmodels.catalogue import load_model
from costmodels.errors import InputError
from planner.formats.files import read_files
from planner.formats.targets import TARGETS
from planner.plan import Plan
from tests.support.layouts import parse_layout

LLAMA = load_model("llama3-8b")


def plan(engine: str = "bundled", precision: str = "fp8", **pins: object) -> Plan:
    return planner.suggest(
        LLAMA,
        world_size=8,
        device="h100",
        global_batch_size=64,
        engine=engine,
        precision=precision,
        pin={"tp": 1, "pp": 1, **pins},
    )


def estimate(text: str, engine: str = "bundled") -> Estimate:
    layout = parse_layout(f"dp=8,gbs=64,zero=3,precision=fp8{text}", LLAMA)
    return planner.evaluate(layout, model=LLAMA, device="h100", engine=engine)


@pytest.mark.parametrize(
    ("engine", "precision", "pins", "message"),
    [
        (
            "bundled",
            "bf16",
            {"fp8_recipe": "tensorwise"},
            "fp8_recipe tensorwise needs precision fp8, not bf16",
        ),
        ("bundled", "fp8", {"fp8_recipe": "delayed"}, "bundled has tensorwise, rowwise, rowwise_with_gw_hp"),
        ("megatron", "fp8", {"fp8_recipe": "rowwise"}, "megatron has delayed, tensorwise, blockwise"),
        (
            "bundled",
            "fp8",
            {"fp8_recipe": "rowwise", "fp8_param_gather": True},
            "needs fp8_recipe tensorwise, not rowwise",
        ),
        (
            "megatron",
            "fp8",
            {"fp8_recipe": "tensorwise", "fp8_param_gather": True},
            "engine megatron is priced without it",
        ),
        (
            "bundled",
            "fp8",
            {"fp8_recipe": "tensorwise", "fp8_param_gather": True, "zero": 0},
            "needs zero_stage of at least 1, not 0",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    engine: str, precision: str, pins: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        plan(engine, precision, **pins)


def test_layouts_hold_what_is_asked_for() -> None:
    found = plan(fp8_recipe="tensorwise", fp8_param_gather=True).layout
    assert (found.precision, found.fp8_recipe, found.gathers_fp8) == ("fp8", "tensorwise", True)
    assert "fp8_recipe=tensorwise fp8_param_gather" in found.describe()
    usual = plan(fp8_param_gather=True).layout
    assert (usual.fp8_recipe, usual.gathers_fp8) == ("default", True)
    with pytest.raises(ValueError, match="needs precision fp8"):
        Layout(layers_per_stage=(2,), global_batch_size=1, fp8_recipe="tensorwise")


def test_recipes_have_prices_of_their_own() -> None:
    usual, rowwise, tensorwise, wide = (
        estimate(f",fp8_recipe={name}").time
        for name in ("default", "rowwise", "tensorwise", "rowwise_with_gw_hp")
    )
    assert usual == tensorwise
    assert tensorwise.compute < rowwise.compute and tensorwise.elementwise < rowwise.elementwise
    # A third of the products in 16 bits, and two casts of six fewer.
    assert wide.elementwise < rowwise.elementwise and wide.compute != rowwise.compute
    # torchtitan's engine does the same products.
    plain, told = (estimate(text, "torchtitan").time for text in ("", ",fp8_recipe=tensorwise"))
    assert plain == told != estimate(",fp8_recipe=rowwise", "torchtitan").time


def test_weights_that_no_rank_shards_are_cast_once_a_step() -> None:
    """More microbatches add casts of activations alone, unless the weights are those of ZeRO, or of rows."""

    def casts(text: str, micro_batches: int) -> float:
        layout = parse_layout(f"dp=8,gbs={8 * micro_batches},{text}", LLAMA)
        with_casts, without = (
            planner.evaluate(one, model=LLAMA, device="h100").time
            for one in (layout, layout.model_copy(update={"precision": "bf16", "fp8_recipe": "default"}))
        )
        # Casts once a step follow the optimizer.
        return with_casts.elementwise + with_casts.optimizer - without.elementwise - without.optimizer

    def growth(text: str) -> float:
        return casts(text, 4) / casts(text, 1)

    assert growth("zero=0,precision=fp8") < 3.9
    assert growth("zero=1,precision=fp8") == pytest.approx(4)
    assert growth("zero=0,precision=fp8,fp8_recipe=rowwise") == pytest.approx(4)


def test_gathering_in_fp8_takes_a_byte_less_for_each_parameter_of_layers() -> None:
    text = ",fp8_recipe=tensorwise"
    plain, narrow = (estimate(text + more) for more in ("", ",fp8_param_gather=1"))
    assert narrow.time.total < plain.time.total
    kept, kept_narrow = (
        planner.evaluate(
            parse_layout(f"dp=8,gbs=64,zero=1,precision=fp8{text}{more}", LLAMA),
            model=LLAMA,
            device="h100",
            engine="torchtitan",
        )
        for more in ("", ",fp8_param_gather=1")
    )
    ends = 2 * LLAMA.padded_vocab(1) * LLAMA.hidden + LLAMA.hidden
    layers = LLAMA.parameters - ends
    saved = kept.memory[0].parameters - kept_narrow.memory[0].parameters
    assert saved == pytest.approx(layers, rel=1e-3)


def test_stages_that_wait_for_their_layers_in_fp8_take_a_byte_less_too() -> None:
    """FSDP2 has gathered some of the stages of a rank."""
    text = "dp=4,pp=2,vpp=8,gbs=32,mbs=1,zero=1,precision=fp8,fp8_recipe=tensorwise"
    plain, narrow = (
        planner.evaluate(parse_layout(text + more, LLAMA), model=LLAMA, device="h100", engine="torchtitan")
        for more in ("", ",fp8_param_gather=1")
    )
    for whole, less in zip(plain.memory, narrow.memory, strict=True):
        assert 0.45 * whole.parameters < less.parameters < whole.parameters


@pytest.mark.parametrize(
    ("target", "engine", "recipe", "text"),
    [
        ("megatron", "megatron", "delayed", "--fp8-recipe delayed"),
        ("megatron", "megatron", "tensorwise", "--fp8-recipe tensorwise"),
        ("megatron", "megatron", "blockwise", "--fp8-recipe blockwise"),
        ("megatron-bridge", "nemo", "tensorwise", "bf16_with_fp8_current_scaling_mixed"),
        ("megatron-bridge", "nemo", "delayed", "bf16_with_fp8_delayed_scaling_mixed"),
        ("megatron-bridge", "nemo", "blockwise", "bf16_with_fp8_subchannel_scaling_mixed"),
    ],
)
def test_recipes_are_exported_and_read_back(
    tmp_path: Path, target: str, engine: str, recipe: str, text: str
) -> None:
    export = TARGETS[target](plan(engine, fp8_recipe=recipe))
    assert text in export.text and "fp8_recipe" not in export.inexpressible_fields
    file = tmp_path / ("job.sh" if target == "megatron" else "job.yaml")
    file.write_text(export.text)
    layout = read_files([file], world_size=8).layout
    assert layout is not None and (layout.precision, layout.fp8_recipe) == ("fp8", recipe)


def test_torchtitans_keys_are_read(tmp_path: Path) -> None:
    text = """
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
seq_len = 8192
[quantize.linear.float8]
"""
    for keys, recipe, gathers in (
        ("", "default", False),
        ('recipe_name = "rowwise_with_gw_hp"', "rowwise_with_gw_hp", False),
        ("enable_fsdp_float8_all_gather = true", "tensorwise", True),
    ):
        file = tmp_path / "job.toml"
        file.write_text(text + keys + "\n")
        layout = read_files([file], world_size=8).layout
        assert layout is not None and layout.precision == "fp8"
        assert (layout.fp8_recipe, layout.fp8_param_gather) == (recipe, gathers)
