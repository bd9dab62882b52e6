"""Sizes in symbols: products and sums of dimensions, read off numbers."""

from __future__ import annotations

import pytest

from costmodels.tapes.text import size_text
from runtime.dryrun.symbols import UnknownSizeError, symbolic

DIMENSIONS = [
    {"arrived": 28480, "seq": 62656, "hidden": 134704, "rank": 3632, "rope": 104},
    {"arrived": 31040, "seq": 80704, "hidden": 136016, "rank": 5008, "rope": 88},
    {"arrived": 32320, "seq": 148672, "hidden": 138352, "rank": 7408, "rope": 56},
    {"arrived": 32960, "seq": 191168, "hidden": 142288, "rank": 11504, "rope": 56},
]

PRIMES = [
    {"arrived": 28480, "seq": 89, "hidden": 8419, "rank": 227, "rope": 13},
    {"arrived": 31040, "seq": 97, "hidden": 8501, "rank": 313, "rope": 11},
    {"arrived": 32320, "seq": 101, "hidden": 8647, "rank": 463, "rope": 7},
    {"arrived": 32960, "seq": 103, "hidden": 8893, "rank": 719, "rope": 7},
]


def test_a_product_is_read_off_its_primes() -> None:
    sizes = [2 * one["seq"] * one["hidden"] for one in DIMENSIONS]
    assert size_text(symbolic(sizes, DIMENSIONS, PRIMES)) == "2 hidden seq"


def test_a_sum_may_have_the_primes_of_a_dimension_by_chance() -> None:
    sizes = [4 * one["seq"] * (one["hidden"] + one["rank"] + one["rope"]) for one in DIMENSIONS]
    # Only in the first recording.
    assert [size % one["arrived"] == 0 for size, one in zip(sizes, DIMENSIONS, strict=True)].count(True) == 1
    assert size_text(symbolic(sizes, DIMENSIONS, PRIMES)) == "4 hidden seq + 4 rank seq + 4 rope seq"


def test_what_is_no_sum_of_dimensions_is_refused() -> None:
    with pytest.raises(UnknownSizeError, match="no sum of 3 products"):
        symbolic([one["seq"] ** 3 + 1 for one in DIMENSIONS], DIMENSIONS, PRIMES)


def test_what_recordings_have_alike_is_a_constant_unless_it_has_a_dimension_in_all_of_them() -> None:
    assert size_text(symbolic([64] * 4, DIMENSIONS, PRIMES)) == "64"
    primes = [one | {"seq": 107} for one in PRIMES]
    alike = [one | {"seq": 128 * 107} for one in DIMENSIONS]
    assert size_text(symbolic([128 * 107] * 4, alike, primes)) == "1 seq"
    others = [one | {"seq": scale * 128 * 107} for scale, one in zip((5, 7, 11, 13), DIMENSIONS, strict=True)]
    with pytest.raises(UnknownSizeError):
        symbolic([128 * 107] * 4, others, primes)


def test_primes_that_are_as_far_apart_as_others_are_told_by_small_coefficients() -> None:
    # 37 more than ranks, too.
    sides = [
        {"tp": tp, "before": before} for tp, before in zip((5, 7, 11, 13), (41, 43, 47, 49), strict=True)
    ]
    sizes = [one["before"] + 1 for one in sides]
    assert size_text(symbolic(sizes, sides, sides)) == "1 + 1 before"


def test_sides_that_are_in_one_tensor_take_no_more_recordings_than_one() -> None:
    sides = [
        {"seq": 89, "nope": 136, "rope": 104, "experts": 211},
        {"seq": 97, "nope": 104, "rope": 88, "experts": 307},
    ]
    primes = [
        {"seq": 89, "nope": 17, "rope": 13, "experts": 211},
        {"seq": 97, "nope": 13, "rope": 11, "experts": 307},
    ]
    sizes = [2 * one["seq"] * (one["nope"] + one["rope"]) for one in sides]
    assert size_text(symbolic(sizes, sides, primes)) == "2 nope seq + 2 rope seq"
    sizes = [8 * (one["experts"] + 1) for one in sides]
    assert size_text(symbolic(sizes, sides, primes)) == "8 + 8 experts"


def test_a_dimension_that_is_the_same_product_of_other_primes_is_no_constant() -> None:
    sides = [{"head": 240, "sharers": 3}, {"head": 240, "sharers": 5}]
    primes = [{"head": 5, "sharers": 3}, {"head": 3, "sharers": 5}]
    assert size_text(symbolic([480, 480], sides, primes)) == "2 head"
    assert size_text(symbolic([64, 64], sides, primes)) == "64"


def test_a_dimension_that_is_as_many_others_in_one_recording_only_is_not_meant() -> None:
    sides = [
        {"arrived": 7120, "seq": 56960, "keys": 7, "group": 13},
        {"arrived": 7760, "seq": 86912, "keys": 5, "group": 11},
    ]
    primes = [{"seq": 89, "keys": 7, "group": 13}, {"arrived": 7760, "seq": 97, "keys": 5, "group": 11}]
    sizes = [2 * one["seq"] * one["keys"] * one["group"] for one in sides]
    # By chance, both of them.
    assert len({one["seq"] * one["keys"] // one["arrived"] for one in sides}) == 1
    assert size_text(symbolic(sizes, sides, primes)) == "2 group keys seq"
