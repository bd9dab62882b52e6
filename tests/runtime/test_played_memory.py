"""What tapes play of the runtime's memory equals dry runs of it on random models and layouts."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, reject, seed, settings

from benchmarks.memory import UnknownError, compare, draw

PARTS, EXAMPLES = 4, 10
"""Parts that run beside each other, and the examples of each, which record the tapes that they need:
`python -m benchmarks.memory` draws hundreds."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_played_tapes_equal_the_dry_run(part: int) -> None:
    @seed(part)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        drawn = draw(lambda values: data.draw(st.sampled_from(list(values))), small=True)
        assume(drawn is not None)
        assert drawn is not None
        note(drawn.describe())
        try:
            errors = compare(*drawn)
        except UnknownError:
            reject()
        assert not errors.misses, (errors.misses, errors.peak, errors.by_kind, errors.traced)

    holds()
