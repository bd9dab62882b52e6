"""Flags of other people's scripts: taken where they mean what happens, refused where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from costmodels.catalogue import load_model
from costmodels.errors import InputError
from planner.options.flags import flag_names
from planner.options.megatron import ACCEPTED, WHOLE
from planner.options.parallel import ParallelOptions, check_alone

GPT = load_model("gpt-22b")


def test_every_accepted_flag_changes_nothing() -> None:
    for field in ACCEPTED:
        values = field.metadata["accepted"]
        for value in values or (True,):
            given = "4" if value == WHOLE else value
            chosen: dict[str, Any] = {field.name: given}
            assert ParallelOptions(**chosen, bf16=True).pins(GPT) == {"precision": "bf16"}
        assert field.metadata["help"]


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("distributed_backend", "mpi", "nccl on GPUs and gloo on CPUs"),
        ("moe_token_dispatcher_type", "allgather", "use alltoall"),
        ("moe_model_type", "deepspeed_moe", "use megatron_moe"),
        ("transformer_impl", "inference_optimized", "expected local or transformer_engine"),
        ("make_vocab_size_divisible_by", "64", "padded to a multiple of 128"),
        ("moe_router_dtype", "fp64", "routers run in fp32"),
        ("moe_token_drop_policy", "position", "use probs"),
        ("dataloader_type", "cyclic", "use single"),
        ("num_workers", "four", "expected a whole number"),
        ("num_workers", "-1", "expected a whole number"),
        ("num_workers", "1.5", "expected a whole number"),
        ("rotary_percent", "0.5", "rotary positions turn whole heads; use 1.0"),
    ],
)
def test_a_value_that_means_something_else_is_refused(name: str, value: str, instead: str) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(InputError) as caught:
        ParallelOptions(**options).pins(GPT)
    line = str(caught.value)
    assert line.startswith(f"--{name.replace('_', '-')} {value}: ") and instead in line


def test_accepted_flags_may_stand_beside_a_plan() -> None:
    check_alone(ParallelOptions(use_flash_attn=True, num_workers="4", distributed_backend="nccl"))
    with pytest.raises(InputError, match="--plan decides model, batch and layout: --fp16 cannot change it"):
        check_alone(ParallelOptions(use_flash_attn=True, fp16=True))
    with pytest.raises(InputError, match="--distributed-backend mpi: "):
        check_alone(ParallelOptions(distributed_backend="mpi"))


def test_no_accepted_flag_is_one_that_decides_something() -> None:
    accepted = {name for field in ACCEPTED for name in flag_names(field)}
    assert len(accepted) == len(ACCEPTED)
    assert not accepted & {"--optimizer", "--sequence-parallel", "--use-distributed-optimizer"}
