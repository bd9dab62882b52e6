"""What ranks with several stages hold follows from a few rounds of micro batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as some

from costmodels.bundled import pass_states
from costmodels.bundled.pass_states import ALL, OTHERS, OWN, fewer, states_of
from costmodels.spec.layout import V_SCHEDULES, Schedule
from costmodels.spec.schedules import schedule_exists


@pytest.fixture(scope="module", autouse=True)
def nothing_remembered() -> Iterator[None]:
    """No states of batches as they are, which are not asked for elsewhere."""
    yield
    states_of.cache_clear()
    pass_states._all_states.cache_clear()


def found(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int) -> set[tuple[int, ...]]:
    """All states of a schedule, with every stage of a rank in a class of its own."""
    states_of.cache_clear()
    pass_states._all_states.cache_clear()
    classes = tuple(tuple(range(chunks)) for _ in range(pipeline))
    states = states_of(schedule, pipeline, chunks, micro_batches, classes)
    columns = [states.rank, states.kind, states.own]
    columns += [states.columns[name] for name in (*ALL, *OTHERS, *OWN)]
    return set(map(tuple, np.column_stack(columns).tolist()))


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    schedule=some.sampled_from(("interleaved", "interleaved_zb", "zbv", "dualpipev")),
    pipeline=some.integers(2, 6),
    chunks=some.integers(2, 5),
    micro_batches=some.integers(6, 60),
)
def test_a_few_rounds_have_every_state(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule, pipeline: int, chunks: int, micro_batches: int
) -> None:
    chunks = 2 if schedule in V_SCHEDULES else chunks
    assume(schedule_exists(schedule, pipeline, chunks, micro_batches))
    assume(fewer(schedule, pipeline, chunks, micro_batches) < micro_batches)
    expected = found(schedule, pipeline, chunks, micro_batches)
    with monkeypatch.context() as patched:
        patched.setattr(pass_states, "fewer", lambda *given: given[-1])
        assert found(schedule, pipeline, chunks, micro_batches) == expected
