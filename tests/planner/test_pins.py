"""Pins: names, values and the lines that refuse wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from costmodels.errors import InputError
from planner.inputs.choice import Choice, Span
from planner.inputs.pins import WherePossible, parse_pins, where_possible


def test_names_count_whatever_their_case() -> None:
    assert parse_pins(["TP=2", "Pipeline-Parallel=4"]) == {"tensor_parallel": 2, "pipeline_parallel": 4}


def test_short_and_full_names_and_all_kinds_of_values() -> None:
    pins = parse_pins(
        ["tp=8", "sp=true", "zero=1", "recompute=full", "schedule=1f1b", "layers_per_stage=8,8,7,7"]
    )
    assert pins == {
        "tensor_parallel": 8,
        "sequence_parallel": True,
        "zero_stage": 1,
        "recompute": "full",
        "schedule": "1f1b",
        "layers_per_stage": (8, 8, 7, 7),
    }
    assert parse_pins({"tp": 8, "sequence_parallel": True, "layers_per_stage": (8, 8, 7, 7)}) == {
        name: pins[name] for name in ("tensor_parallel", "sequence_parallel", "layers_per_stage")
    }
    assert parse_pins(
        ["cp=2", "cp_form=ring", "recompute_modules=norm,core_attention", "zero_replicas=2"]
    ) == {
        "context_parallel": 2,
        "context_parallel_form": "ring",
        "recompute": "selective",
        "recompute_modules": ("core_attention", "norm"),
        "zero_replicas": 2,
    }
    assert parse_pins({"recompute_modules": ("mlp",), "offload_activations": True}) == {
        "recompute": "selective",
        "recompute_modules": ("mlp",),
        "offload_activations": True,
    }
    assert parse_pins(["ep=4", "etp=2", "optimizer=AdamW"]) == {
        "expert_parallel": 4,
        "expert_tensor_parallel": 2,
        "optimizer": "adam",
    }
    assert parse_pins(None) == {}
    assert parse_pins("pp = 4") == {"pipeline_parallel": 4}


@pytest.mark.parametrize(
    ("pin", "line"),
    [
        ("tensor_paralel=8", "pin tensor_paralel: no such field; did you mean tensor_parallel?"),
        ("=8", "pin without a name before its value; expected name=value, such as tp=8"),
        ("ttp=2", "pin ttp: no such field; did you mean tp?"),
        ("fsdp=3", "pin fsdp: no such field; did you mean zero=3?"),
        ("ZeRO3", "pin 'ZeRO3': expected name=value, such as zero=3"),
        ("schedule=1f1", "dualpipev; did you mean 1f1b?"),
        ("schedule=zb-v", "dualpipev; did you mean zbv?"),
        ("schedule=dualpipe", "dualpipev; did you mean dualpipev?"),
        ("schedule=fsdp", "dualpipev; did you mean pin zero=3?"),
        ("cp_form=ulysses", "ring; did you mean all_to_all?"),
        ("zbv", "expected name=value, such as schedule=zbv"),
        ("nothing", "expected name=value, such as tensor_parallel=8"),
        ("tp", "pin 'tp': expected name=value, such as tensor_parallel=8"),
        ("tp=", "expected name=value"),
        ("tp=eight", "pin tensor_parallel=eight: expected a whole number of at least 1"),
        ("tp=0", "pin tensor_parallel=0: expected a whole number of at least 1"),
        ("tp=2.5", "pin tensor_parallel=2.5: expected a whole number"),
        ("mbs=" + "9" * 24, "expected a whole number of at least 1, and at most 1048576"),
        ("mbs=" + "9" * 5000, "expected a whole number of at least 1, and at most 1048576"),
        ("sp=maybe", "pin sequence_parallel=maybe: expected true or false"),
        ("zero=4", "pin zero_stage=4: expected one of 0, 1, 2, 3"),
        ("recompute=some", "pin recompute=some: expected one of none, selective, full"),
        ("precision=bf8", "pin precision=bf8: expected one of fp32"),
        ("ep=0", "pin expert_parallel=0: expected a whole number of at least 1"),
        ("optimizer=lion", "pin optimizer=lion: expected one of adam, sgd, adafactor, muon, adam8bit, came"),
        ("cp_form=mesh", "pin context_parallel_form=mesh: expected one of all_gather, all_to_all, ring"),
        (["cp=1", "cp_form=ring"], "context_parallel_form=ring needs context_parallel of at least 2"),
        (["schedule=zbv", "vpp=3"], "pin schedule=zbv contradicts virtual_pipeline_parallel=3; 1f1b needs"),
        ("recompute_modules=norm,head", "expected some of core_attention, mlp, norm, activation"),
        ("recompute_modules=norm,norm", "each once"),
        (
            ["recompute=full", "recompute_modules=norm"],
            "pin recompute_modules need recompute selective, not full",
        ),
        (["recompute=none", "recompute_num_layers=2"], "need recompute selective or full"),
        (["recompute=selective", "recompute_num_layers=2"], "add recompute_method block"),
        ("recompute_method=block", "pin recompute_method=block needs recompute_num_layers"),
        (
            ["recompute=full", "offload_activations=true"],
            "pin offload_activations has nothing to send with recompute full; use recompute selective",
        ),
        ("offload_optimizer=maybe", "pin offload_optimizer=maybe: expected true or false"),
        (["zero=0", "zero_replicas=2"], "pin zero_replicas=2 needs zero_stage of at least 1, not 0"),
        ("gradient_reduction=fp8", "expected one of fp32, bf16"),
        ("layers_per_stage=8,x", "pin layers_per_stage=8,x: expected layers of each stage"),
        (["tp=2", "tensor_parallel=4"], "pin tensor_parallel is given twice: 2 and 4"),
        (["schedule=1f1b", "vpp=2"], "pin schedule=1f1b contradicts virtual_pipeline_parallel=2"),
        ({"tp": True}, "pin tensor_parallel=True: expected a whole number"),
        ({"zero": WherePossible(7)}, "pin zero_stage=7: expected one of 0, 1, 2, 3"),
        ({"tp": WherePossible(2)}, "pin tensor_parallel=2 where possible: expected a plain value"),
    ],
)
def test_wrong_pins_are_refused_in_one_line(pin: Any, line: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_pins(pin)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_where_possible_survives_another_parse_and_refuses_another_value() -> None:
    pins = where_possible(parse_pins("tp=2"), "zero_stage", 1)
    assert parse_pins(pins) == pins == {"tensor_parallel": 2, "zero_stage": WherePossible(1)}
    assert where_possible(pins, "zero_stage", 1) == pins
    assert where_possible(parse_pins("zero=1"), "zero_stage", 1) == {"zero_stage": 1}
    with pytest.raises(InputError, match="pin zero_stage is given twice: 2 and 1"):
        where_possible(parse_pins("zero=2"), "zero_stage", 1)


def test_ranges_lists_and_what_is_forbidden_narrow_a_degree() -> None:
    assert parse_pins(["tp=2..8", "pp=..4", "dp = 2 ..", "mbs=1,4", "schedule=zbv,1F1B", "zero=1..2"]) == {
        "tensor_parallel": Choice(Span(2, 8)),
        "pipeline_parallel": Choice(Span(None, 4)),
        "data_parallel": Choice(Span(2, None)),
        "micro_batch_size": Choice((1, 4)),
        "schedule": Choice(("zbv", "1f1b")),
        "zero_stage": Choice(Span(1, 2)),
    }
    assert parse_pins({"tp": "2..8", "pp": [2, 4]}) == parse_pins(["tp=2..8", "pp=2,4"])
    pins = parse_pins("tp=2..8", ["tp=4", "recompute=full", "tp=8", "sp=true", "recompute_method=block"])
    assert {name: str(value) for name, value in pins.items()} == {
        "tensor_parallel": "2..8 but not 4 but not 8",
        "recompute": "not full",
        "sequence_parallel": "False",
        "recompute_method": "uniform",
    }
    tensor = pins["tensor_parallel"]
    assert isinstance(tensor, Choice)
    assert [size for size in (1, 2, 4, 6, 8, 16) if size in tensor] == [2, 6]
    assert parse_pins(pins) == pins
    # A degree that is pinned to one value stays, if the value is not forbidden.
    assert parse_pins("tp=8", {"tp": [2, 4]}) == {"tensor_parallel": 8}
    assert where_possible(parse_pins("zero=1..3"), "zero_stage", 1) == {"zero_stage": WherePossible(1)}


@pytest.mark.parametrize(
    ("pin", "forbid", "line"),
    [
        (
            "tp=8..2",
            None,
            "pin tensor_parallel=8..2: expected a range from the smaller to the larger, such as",
        ),
        ("tp=..", None, "pin tensor_parallel=..: expected a range"),
        ("tp=2..x", None, "pin tensor_parallel=2..x: expected a range"),
        ("tp=2,0", None, "pin tensor_parallel=0: expected a whole number of at least 1"),
        ("zero=1,7", None, "pin zero_stage=7: expected one of 0, 1, 2, 3"),
        ("schedule=1f1b,gpipe", None, "pin schedule=gpipe: expected one of 1f1b"),
        ("zero_replicas=2..4", None, "pin zero_replicas=2..4: expected one value: ranges are for tensor"),
        ("recompute_num_layers=1..4", None, "expected one value: ranges are for"),
        (["tp=2..8", "tp=2..4"], None, "pin tensor_parallel is given twice: 2..8 and 2..4"),
        ("tp=8", "tp=8", "pin tensor_parallel=8 and forbid tensor_parallel=8 contradict each other"),
        ("tp=8", "tp=4..16", "pin tensor_parallel=8 and forbid tensor_parallel=4..16 contradict each other"),
        (None, "zero=0..3", "forbid zero_stage=0..3: leaves none of 0, 1, 2, 3"),
        (None, ["sp=true", "sp=false"], "forbid sequence_parallel=true,false: leaves none of false, true"),
        (
            None,
            "optimizer=adam",
            "forbid optimizer=adam: the search does not choose this degree; pin the value to use",
        ),
        (None, "layers_per_stage=8,8", "forbid layers_per_stage=8,8: the search does not choose this degree"),
        (None, "tpx=4", "forbid tpx: no such field"),
        (None, "tp", "forbid 'tp': expected name=value"),
        ({"zero": WherePossible(1)}, "zero=2", "forbid zero_stage=2: it is pinned to 1 where possible"),
    ],
)
def test_wrong_ranges_and_prohibitions_are_refused_in_one_line(pin: Any, forbid: Any, line: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_pins(pin, forbid)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_degrees_that_are_forbidden_in_one_word_are_told_apart() -> None:
    with pytest.raises(InputError) as error:
        parse_pins(None, "ep=64, pp=4")
    assert str(error.value) == "forbid 'ep=64, pp=4': one degree each, as in --forbid ep=64 --forbid pp=4"
    with pytest.raises(InputError) as error:
        parse_pins(None, "ep=64 pp=4")
    assert str(error.value) == "forbid 'ep=64 pp=4': one degree each, as in --forbid ep=64 --forbid pp=4"
    with pytest.raises(InputError) as error:
        parse_pins("tp=2 = zero 2")
    assert str(error.value) == "pin 'tp=2 = zero 2': expected name=value with one value, such as tp=8"


@pytest.mark.parametrize(
    ("text", "pins"),
    [
        ("tp=4+sp pp=8", {"tensor_parallel": 4, "sequence_parallel": True, "pipeline_parallel": 8}),
        ("ep=64, pp=4", {"expert_parallel": 64, "pipeline_parallel": 4}),
        (
            "dp=2 zero=1 mbs=1 x 8 recompute=selective(norm+mlp)/block:2 offload=activations cuda_graphs",
            {"data_parallel": 2, "zero_stage": 1, "micro_batch_size": 1, "recompute": "selective"}
            | {"recompute_modules": ("mlp", "norm"), "recompute_method": "block", "recompute_num_layers": 2}
            | {"offload_activations": True, "cuda_graphs": True},
        ),
    ],
)
def test_layouts_as_they_are_printed_are_pins(text: str, pins: dict[str, Any]) -> None:
    assert parse_pins(text) == parse_pins([text]) == pins
