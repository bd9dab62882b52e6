"""The share of estimates in the right order: pairs of measured rows, and widths fitted to them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.calibration.measurements import read_measurements
from benchmarks.calibration.order_fit import Pairs, fitted_widths, joined, pairs_of, unseen_chances
from benchmarks.order import figures, measured_choices, told_apart_at
from costmodels.order import KINDS, OrderWidths, widths_of

COLUMNS = (
    "source_id,model_name,layers,hidden,ffn,heads,kv_heads,vocab,seq,gpu,gpus,gpus_per_node,tp,pp,dp,mbs,gbs"
)
COLUMNS += ",recompute,zero_stage,precision,flash,sp,step_time_s"


@pytest.fixture
def rows(tmp_path):
    """Three layouts of one job, one of another batch, and one that was measured twice."""
    file = tmp_path / "some.csv"
    job = "vtrain_single,m,8,1024,4096,16,16,50257,1024,A100,8,8"
    lines = [
        f"{job},1,1,8,1,32,full,0,fp16,0,0,1.00",
        f"{job},2,1,4,1,32,full,0,fp16,0,0,1.50",
        f"{job},2,1,4,2,32,full,0,fp16,0,0,1.25",
        f"{job},2,1,4,2,32,full,0,fp16,0,0,1.27",
        f"{job},2,1,4,2,64,full,0,fp16,0,0,2.50",
    ]
    file.write_text("\n".join([COLUMNS, *lines]) + "\n")
    found, skipped = read_measurements(str(file))
    assert len(found) == 5 and not skipped
    return found


def test_pairs_are_of_one_job_and_two_layouts(rows):
    pairs = pairs_of(rows)
    # Four rows with the same batch have six pairs, of which one has the same layout twice.
    assert len(pairs) == 5 and set(pairs.source) == {"vtrain_single"}
    assert (pairs.predicted >= 0).all() and (pairs.differ[KINDS.index("run")] == 1).all()
    logs = {
        round(abs(math.log(one / other)), 9)
        for one, other in [(1, 1.5), (1, 1.25), (1, 1.27), (1.5, 1.25), (1.5, 1.27)]
    }
    assert {round(abs(each), 9) for each in pairs.measured.tolist()} == logs
    only_micro_batch = pairs.differ[KINDS.index("tensor_parallel")] == 0
    assert only_micro_batch.sum() == 2
    assert (pairs.differ[KINDS.index("micro_batch_size"), only_micro_batch] == 1).all()


def made(seed: int, count: int, known: OrderWidths, source: str) -> Pairs:
    """Pairs whose errors are drawn from the distribution that `known` tells."""
    draw = np.random.default_rng(seed)
    differ = draw.integers(0, 3, (len(KINDS), count)).astype(float)
    differ[0] = 1
    spread = draw.choice([0.02, 0.1, 0.5], count)
    predicted = draw.exponential(0.2, count)
    errors = widths_of(differ, spread, known) * draw.standard_cauchy(count)
    return Pairs((source,) * count, differ, spread, predicted, predicted + errors)


def test_the_fit_finds_the_widths_that_made_the_pairs():
    pytest.importorskip("scipy")
    widths = dict(zip(KINDS, [0.02, 0.05, 0.1, 0.08, 0.04, 0.06, 0.12, 0.05], strict=True))
    known = OrderWidths(widths, 0.5, 0.3)
    pairs = joined([made(seed, 6000, known, f"source {seed}") for seed in range(3)])
    found = fitted_widths(pairs, 0.3)
    assert found.range_power == pytest.approx(0.5, abs=0.1)
    ratio = widths_of(pairs.differ, pairs.spread, found) / widths_of(pairs.differ, pairs.spread, known)
    off = np.abs(np.log(ratio))
    assert np.median(off) < 0.15 and np.quantile(off, 0.95) < 0.5
    # By widths that have not seen a source, printed chances are those that come true.
    chances = unseen_chances(pairs, 0.3)
    shown = figures(pairs, chances, 0.3)
    assert all(abs(one["printed"] - one["measured"]) < 0.05 for one in shown["tenths"])
    assert shown["all"]["pairs"] == 18000 == sum(one["pairs"] for one in shown["sources"].values())
    assert sum(one["pairs"] for one in shown["predicted"]) == 18000
    best = told_apart_at(pairs, chances)
    told = chances < best
    assert pairs.right[told].mean() >= 0.93 and not pairs.right[chances < best + 0.05].mean() >= 0.93


def test_choices_that_were_measured_are_those_of_groups_of_ranks(rows):
    assert measured_choices(rows) == {
        rows[0].engine.name: {"ampere": {"recompute": ["none"], "zero_stage": [0]}}
    }
