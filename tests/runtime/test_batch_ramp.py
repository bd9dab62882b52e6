"""Global batches that grow: sizes, the same training as by hand, and resuming in the middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costmodels.errors import InputError
from costmodels.spec.table import LayoutTable
from planner.options.flags import arguments
from runtime.logs.sample_log import read_samples
from runtime.settings.batch_ramp import BatchRamp, batch_ramp, ramp_rule
from runtime.settings.job_rules import check_rules
from runtime.settings.training_options import TrainingOptions
from tests.support.jobs import TINY, write_corpus
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import training as work
from tests.support.running_jobs import forked
from tests.support.worker_pool import WorkerPool

SPEC = MODELS["gpt2"]


def test_sizes_follow_the_samples_as_in_megatron_lm() -> None:
    # Their example: 16 8 300000 up to 1024 is 126 steps of about 2380 samples.
    ramp = BatchRamp(16, 8, 300_000, 1024)
    assert (len(ramp.sizes()), ramp.sizes()[0], ramp.sizes()[-1]) == (127, 16, 1024)
    assert [ramp.at(samples) for samples in (0, 2380, 2381, 4761, 4762)] == [16, 16, 24, 24, 32]
    assert [ramp.at(samples) for samples in (299_999, 300_000, 300_001, 10**7)] == [1016, 1024, 1024, 1024]


def test_all_samples_of_a_run_are_counted() -> None:
    ramp = BatchRamp(4, 4, 32, 16)
    sizes, consumed = [], 0
    for _ in range(12):
        sizes.append(ramp.at(consumed))
        consumed += sizes[-1]
        assert ramp.total(len(sizes)) == consumed
    assert sizes == [4, 4, 4, 8, 8, 12, 16, 16, 16, 16, 16, 16]
    constant = batch_ramp(None, parse_layout("gbs=8", SPEC))
    assert (constant.at(0), constant.at(100), constant.total(7), list(constant.sizes())) == (8, 8, 56, [8])


def test_three_numbers_make_a_ramp() -> None:
    assert batch_ramp((16, 8, 300), parse_layout("gbs=32", SPEC)) == BatchRamp(16, 8, 300, 32)
    assert arguments(TrainingOptions(rampup_batch_size=(16, 8, 300))) == [
        "--rampup-batch-size",
        "16",
        "8",
        "300",
    ]


@pytest.mark.parametrize(
    ("numbers", "layout", "message"),
    [
        ((16, 7, 100), "gbs=32", "batches of 16 do not grow by 7 to the plan's global batch size 32"),
        ((64, 8, 100), "gbs=32", "batches of 64 do not grow by 8 to the plan's global batch size 32"),
        (
            (2, 2, 100),
            "gbs=8,dp=2,mbs=2",
            "has a batch of 2 that the layout cannot run: micro_batch_size 2 x data_parallel 2 exceeds",
        ),
        ((2, 2, 100), "gbs=8,schedule=zbv", "has a batch of 2 that the layout cannot run: "),
    ],
)
def test_a_ramp_that_cannot_run_is_refused_in_one_line(
    numbers: tuple[int, int, int], layout: str, message: str
) -> None:
    full = parse_layout(layout, SPEC)
    with pytest.raises(InputError) as refused:
        check_rules([ramp_rule(numbers)], SPEC, full)
    assert str(refused.value).startswith("--rampup-batch-size")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("layout", "micro_batches"), [("dp=2", 2), ("dp=2,mbs=2", 4), ("mbs=3", 3), ("", 1)])
def test_a_ramp_runs_where_every_batch_of_it_is_whole_micro_batches(layout: str, micro_batches: int) -> None:
    full = parse_layout(f"gbs=12,{layout}", SPEC)
    for start in range(1, 14):
        for increment in (1, 2, 3, 4, 6, 12):
            sizes = range(start, 13, increment)
            leads = start <= 12 and sizes[-1] == 12
            runs = leads and all(size % micro_batches == 0 for size in sizes)
            found = ramp_rule((start, increment, 10)).broken(SPEC, LayoutTable.of([full]))
            assert bool(found.all()) != runs, (start, increment)


SIZES = [4, 4, 8, 8, 12, 12]


@pytest.mark.parametrize("text", ["dp=2,zero=1", "tp=2", "pp=2", "pp=2,vpp=2", "dp=2,pp=2,zero=1"])
def test_losses_of_growing_batches_are_those_of_one_rank(pool: WorkerPool, text: str) -> None:
    options = TrainingOptions(train_iters=6, lr=1e-2)
    alone, split = (parse_layout(f"gbs=12{more}", SPEC) for more in ("", f",{text}"))
    [(expected, validation)] = pool.run(work.losses_of_sizes, 1, SPEC, alone, options, SIZES)
    for losses, valid in pool.run(work.losses_of_sizes, split.world_size, SPEC, split, options, SIZES):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert valid == pytest.approx(validation, rel=1e-5)


@pytest.mark.parametrize("model", ["gpt2", "mixtral"])
def test_a_smaller_batch_trains_as_under_a_layout_of_that_batch(pool: WorkerPool, model: str) -> None:
    spec = MODELS[model]
    # Losses of routers are divided by the tokens of the batch, too.
    options = TrainingOptions(
        train_iters=2, lr=1e-2, lr_decay_style="constant", moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.1
    )
    small, large = (parse_layout(f"gbs={size},pp=2", spec) for size in (4, 12))
    [(expected, _), _] = pool.run(work.losses_of_sizes, 2, spec, small, options, [4, 4])
    [(losses, _), _] = pool.run(work.losses_of_sizes, 2, spec, large, options, [4, 4])
    assert losses == expected


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ranks
def test_a_run_resumes_in_the_middle_of_a_ramp(tmp_path: Path) -> None:
    data = write_corpus(tmp_path)
    folders = {name: tmp_path / name for name in ("whole", "parts")}
    common = [
        *(*TINY, "--device", "cpu", "--global-batch-size", "12", "--pin", "pp=2", "--pin", "mbs=2"),
        *("--fp32", "--data-path", data, "--split", "90,10,0", "--train-iters", "8", "--lr", "1e-2"),
        *(
            "--rampup-batch-size",
            "4",
            "4",
            "24",
            "--log-interval",
            "1",
            "--eval-interval",
            "3",
            "--eval-iters",
            "1",
            "--log-samples",
            "--no-profile",
        ),
    ]
    whole = forked([*common, "--log-dir", folders["whole"]], 2, tmp_path / "log")
    assert whole.exit_code() == 0, whole.output()
    parts: list[str | Path] = [
        *common,
        "--log-dir",
        folders["parts"],
        "--save",
        folders["parts"],
        "--load",
        folders["parts"],
    ]
    for number in range(2):
        stop = ["--exit-interval", "4"] if number == 0 else []
        part = forked([*parts, *stop], 2, tmp_path / f"log{number}")
        assert part.exit_code() == 0, part.output()
    lines = whole.output().splitlines()
    steps = [line for line in lines if "global batch size" in line]
    sizes = [int(line.split("global batch size:")[1].split("|")[0]) for line in steps]
    consumed = [int(line.split("consumed samples:")[1].split("|")[0]) for line in steps]
    assert sizes == [4, 4, 4, 8, 8, 12, 12, 12]
    assert consumed == [sum(sizes[: number + 1]) for number in range(8)]
    for folder in folders.values():
        # Each step takes the next samples, as many as its batch has, and its throughput is of these alone.
        taken = read_samples(folder)
        assert [sorted(taken[number + 1]) for number in range(8)] == [
            list(range(end - size, end)) for end, size in zip(consumed, sizes, strict=True)
        ]
        figures = [record for record in records(folder) if "tokens_per_s" in record]
        tokens = [record["tokens_per_s"] * record["step_time_s"] for record in figures]
        assert tokens == pytest.approx([16 * size for size in sizes])
    names = ("iteration", "loss", "grad_norm", "learning_rate", "validation_loss")
    expected, found = (
        [[record.get(name) for name in names] for record in records(folder)] for folder in folders.values()
    )
    assert found == expected
