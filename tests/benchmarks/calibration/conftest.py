"""Models, clusters, engines and measurements by hand, so that tests know every number of a measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.calibration.measurements import Measurement
from costmodels import Cluster, Engine, Layout, ModelSpec
from tests.support.hand_made import a100, cluster, engine, gpt, layout, llama, mixture

__all__ = ["a100", "cluster", "engine", "gpt", "layout", "llama", "measurement", "mixture"]


@pytest.fixture
def measurement(
    gpt: ModelSpec,
    cluster: Callable[..., Cluster],
    engine: Callable[..., Engine],
    layout: Callable[..., Layout],
) -> Callable[..., Measurement]:
    """Makes one row of 8 devices; fields of `Measurement` may be replaced."""
    usual = Measurement(
        source="here",
        sweep="",
        reference="table 1",
        line=2,
        model=gpt,
        cluster=cluster(8),
        engine=engine("megatron"),
        layouts=(layout(gpt, dp=8, m=2),),
        step_time_s=1.0,
        oom=False,
        allocated_bytes=None,
        reserved_bytes=None,
        first_rank_only=False,
    )
    return partial(replace, usual)
