"""Messages of the command line name what was typed."""

from __future__ import annotations

import dataclasses

import pytest

from planner.options.batch import BatchOptions
from planner.options.cluster import ClusterOptions
from planner.options.flags import flag_names
from planner.options.messages import spelling
from planner.options.parallel import ParallelOptions


def said(message: str, typed: str) -> str:
    every = [
        field
        for group in (ClusterOptions, BatchOptions, ParallelOptions)
        for field in dataclasses.fields(group)
    ]
    fields = [(field.name, flag_names(field), field.metadata.get("degree")) for field in every]
    return spelling(fields, typed.split()).of(message)


@pytest.mark.parametrize(
    ("typed", "message", "expected"),
    [
        ("", "no batch size: give global_batch_size", "no batch size: give --global-batch-size"),
        ("--gbs 7", "global_batch_size 7 is not divisible", "--gbs 7 is not divisible"),
        (
            "--max-global-batch-size=9",
            "max_global_batch_size 9: global_batch_size 8 is not divisible",
            "--max-global-batch-size 9: a batch of 8 is not divisible",
        ),
        ("--tp 3", "tensor_parallel 3 does not divide 8", "--tp 3 does not divide 8"),
        ("--tensor-parallel=3", "pin tensor_parallel=3: expected", "--tensor-parallel 3: expected"),
        ("--pin tp=x", "pin tensor_parallel=x: expected", "pin tp=x: expected"),
        ("--pin=TP=x", "pin tensor_parallel=x: expected", "pin TP=x: expected"),
        ("--objective=speed", "objective speed: expected one of", "--objective speed: expected one of"),
        ("--island 0", "an island 0: no message of it", "an island 0: no message of it"),
        # A degree that the search chose is no flag that anybody gave.
        ("--tp 2", "tensor_parallel 2 x data_parallel 4", "--tp 2 x data_parallel 4"),
        ("--tp 2", "it fits without the pin tensor_parallel=2, or", "it fits without --tp 2, or"),
        (
            "--pp 1",
            "pin pipeline_parallel=1 and forbid pipeline_parallel=1",
            "--pp 1 and forbid pipeline_parallel=1",
        ),
        (
            "--swap-attention --tp 2",
            "pin offload_activations=True: engine a offloads no activations",
            "--swap-attention: engine a offloads no activations",
        ),
        (
            "--use-distributed-optimizer",
            "pin zero_stage=1 where possible: engine a runs zero_stage 0, 2",
            "--use-distributed-optimizer: engine a runs zero_stage 0, 2",
        ),
        (
            "--recompute-granularity full",
            "pin recompute=full, but the closest has recompute=none",
            "--recompute-granularity full, but the closest has recompute=none",
        ),
        # Plans and rules name degrees by the word before an equals sign, and files name their own fields.
        ("--tp 2", "the closest, tp=2 pp=1, needs 9 GiB", "the closest, tp=2 pp=1, needs 9 GiB"),
        (
            "--world-size 8",
            "device file 'my.yaml': field nics_per_node is missing",
            "device file 'my.yaml': field nics_per_node is missing",
        ),
        ("--tp 2", "plan a.json: layout.world_size 0", "plan a.json: layout.world_size 0"),
        ("--tp 2", "cannot write '/tmp/world_size/x'", "cannot write '/tmp/world_size/x'"),
    ],
)  # fmt: skip
def test_names_are_those_that_were_typed(typed: str, message: str, expected: str) -> None:
    assert said(message, typed) == expected
