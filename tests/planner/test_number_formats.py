"""MXFP8 and NVFP4: priced where devices and engines have them, exported and read back."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from costmodels.catalogue import load_model
from costmodels.errors import InputError
from planner.formats.files import read_files
from planner.formats.targets import TARGETS
from planner.plan import Plan
from tests.support.layouts import parse_layout

BLOCKS = {"mxfp8": 2 * (1 + 1 / 32), "nvfp4": 2 * (1 / 2 + 1 / 16)}
"""Bytes of a weight that is kept cast, by rows and by columns, with its factors."""


def searched(engine: str, precision: str) -> Plan:
    """The first plan for two nodes of B200."""
    return planner.suggest(
        "llama3-8b",
        world_size=16,
        device="b200",
        global_batch_size=64,
        engine=engine,
        precision=precision,
    )


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("target", "engine"), [("megatron", "megatron"), ("megatron-bridge", "nemo")])
def test_formats_are_exported_and_read_back(target: str, engine: str, precision: str, tmp_path: Path) -> None:
    export = TARGETS[target](searched(engine, precision))
    file = tmp_path / ("job.sh" if target == "megatron" else "job.yaml")
    file.write_text(export.text)
    layout = read_files([file], world_size=16).layout
    assert layout is not None and layout.precision == precision
    assert "precision" not in export.inexpressible_fields


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("mxfp8", ("--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8")),
        ("nvfp4", ("--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4")),
    ],
)
def test_megatrons_flags(precision: str, flags: tuple[str, ...]) -> None:
    text = TARGETS["megatron"](searched("megatron", precision)).text
    assert all(flag in text for flag in flags)


@pytest.mark.parametrize("engine", ["nemo", "megatron"])
@pytest.mark.parametrize(("device", "stages"), [("gb200", 16), ("gb300", 8)])
def test_gains_of_4_bits_are_those_of_published_steps(engine: str, device: str, stages: int) -> None:
    # Llama 3.1 405B on 256 devices, Megatron-Bridge's summaries of 26.02 to 26.06: 1.33 to 1.40 times fp8.
    model = load_model("llama3-405b").model_copy(update={"layers": 128})
    text = f"tp=4,sp=1,pp={stages},vpp=4,schedule=interleaved,dp={64 // stages},zero=1,gbs=1536,precision="
    fp8, fp4 = (
        planner.evaluate(parse_layout(text + name, model), model=model, device=device, engine=engine).time
        for name in ("fp8", "nvfp4")
    )
    assert 1.3 < fp8.total / fp4.total < 1.42


@pytest.mark.parametrize("precision", BLOCKS)
def test_weights_are_kept_cast_beside_those_in_16_bits(precision: str) -> None:
    model = load_model("llama3-8b")
    held = {
        name: planner.evaluate(
            parse_layout(f"dp=8,zero=1,gbs=8,precision={name}", model),
            model=model,
            device="b200",
            engine="megatron",
        ).memory[0]
        for name in ("bf16", precision)
    }
    more = held[precision].parameters - held["bf16"].parameters
    # Embedding, head and the last norm are computed with in 16 bits.
    layers = model.parameters - 2 * model.vocab * model.hidden - model.hidden
    assert more == pytest.approx(BLOCKS[precision] * layers, rel=1e-6)


@pytest.mark.parametrize(
    ("device", "engine", "message"),
    [
        (
            "h100",
            "megatron",
            "precision nvfp4: h100 with engine megatron trains in fp32, fp16, bf16, fp8$",
        ),
        (
            "gb300",
            "bundled",
            "precision nvfp4: gb300 with engine bundled trains in .*; engines that do: megatron, nemo$",
        ),
    ],
)
def test_others_are_refused_by_one_line(device: str, engine: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        planner.suggest(
            "llama3-8b",
            world_size=16,
            device=device,
            global_batch_size=64,
            engine=engine,
            precision="nvfp4",
        )
