"""Reads symbolic sizes off numbers: which product of dimensions, or sum of such, a size is.

The dimensions of a recording are products of a small number and of a prime that no other dimension has. So
the primes of a size tell its dimensions, and what is left is a coefficient, which must be the same in all
recordings. Where that fails, a size is a sum: of what its parts have in common times a few small terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import reduce
from itertools import combinations, combinations_with_replacement
from math import lcm, prod
from operator import mul

import numpy as np

from costmodels.spec.table import Ints
from costmodels.tapes.tape import Size, Term

Dimensions = Mapping[str, int]

Summand = tuple[tuple[str, ...], ...]
"""Products of dimensions that one coefficient has together."""

LARGEST_COEFFICIENT = 64
"""Of a term of a sum, numerator and denominator: beyond it, terms would fit anything."""

LARGEST_OF_PRODUCT = 1024
"""Of a product alone: layers with a loop of experts have their number in it."""

MOST_TERMS = 3

ONE = ""
"""Stands for the number 1 among dimensions."""

WHOLES = (
    ("nope", "rope"),
    ("nope", "value"),
    ("latent_rank", "rope"),
    ("query_rank", "latent_rank", "rope"),
    ("hidden", "latent_rank", "rope"),
    ("state_head", "state_value"),
    ("seq", "before"),
    (ONE, "before"),
    (ONE, "experts"),
    (ONE, ONE, "group"),
)
"""Sides that are in one tensor, one after the other: their sum is proved as one dimension is."""

LARGE = 128
"""What is no coefficient."""

MODULUS = 2**31 - 1
"""A prime whose residues have products that 64 bits hold."""

ROUNDED = {"sent", "arrived", "kernel_seq", "filled"}
"""Dimensions that are nearly products of others, which are meant where both fit."""

RANKS = ("tp", "cp", "ep", "etp", "sharers")


class UnknownSizeError(RuntimeError):
    """A size is no small sum of products of dimensions."""


def symbolic(sizes: Sequence[int], dimensions: Sequence[Dimensions], primes: Sequence[Dimensions]) -> Size:
    """The size that has these values in recordings with these dimensions.

    Args:
        sizes: of each recording.
        dimensions: of each.
        primes: of each, the prime of every dimension that varies freely.

    Raises:
        UnknownSizeError: there is none.
    """
    if len(set(sizes)) == 1 and (name := _same_dimension(sizes[0], dimensions, primes)):
        return (Term(sizes[0] // dimensions[0][name], 1, ((name, 1),)),)
    # What all recordings have alike is a constant, but for what has the prime of a dimension in all of them.
    if len(set(sizes)) == 1 and not (sizes[0] and _shared_primes(sizes[0], primes)):
        return () if not sizes[0] else (Term(sizes[0], 1, ()),)
    powers = [_powers(Fraction(size), *own) for size, *own in zip(sizes, dimensions, primes, strict=True)]
    rests = _rests(sizes, dimensions, powers[0])
    is_product = powers[1:] == powers[:-1] and len(set(rests)) == 1
    if is_product and max(rests[0].numerator, rests[0].denominator) <= LARGEST_OF_PRODUCT:
        return (Term(rests[0].numerator, rests[0].denominator, _sorted(powers[0])),)
    # A recording may have the prime of a dimension by chance: another one tells what is meant.
    for own in sorted(powers, key=_rounded):
        (rest, *others) = set(_rests(sizes, dimensions, own))
        if not others and max(rest.numerator, rest.denominator) <= LARGEST_COEFFICIENT:
            return (Term(rest.numerator, rest.denominator, _sorted(own)),)
    return _sum(sizes, dimensions, powers)


def _rounded(powers: Mapping[str, int]) -> int:
    return len(ROUNDED & powers.keys())


def _same_dimension(size: int, dimensions: Sequence[Dimensions], primes: Sequence[Dimensions]) -> str | None:
    """A dimension that all recordings have alike, of other primes, and that is in a size: sums of small
    primes are few."""
    return next(
        (
            name
            for name, value in dimensions[0].items()
            if value >= LARGE and size and size % value == 0
            if all(own[name] == value for own in dimensions) and len({own.get(name) for own in primes}) > 1
        ),
        None,
    )


def _shared_primes(size: int, primes: Sequence[Dimensions]) -> list[str]:
    """Dimensions whose primes are in a size, in all recordings."""
    return [name for name in primes[0] if all(size % own.get(name, size + 1) == 0 for own in primes)]


def _powers(value: Fraction, dimensions: Dimensions, primes: Dimensions) -> dict[str, int]:
    """Exponents of dimensions; one that has the primes of others comes before them."""
    found = {}
    for name, prime in primes.items():
        exponent, top, bottom = 0, value.numerator, value.denominator
        while top and top % prime == 0:
            top, exponent = top // prime, exponent + 1
        while bottom % prime == 0:
            bottom, exponent = bottom // prime, exponent - 1
        if exponent:
            found[name] = exponent
            value /= Fraction(dimensions[name]) ** exponent
    return found


def _rests(
    sizes: Sequence[int | Fraction], dimensions: Sequence[Dimensions], powers: Mapping[str, int]
) -> list[Fraction]:
    """What is left of sizes without powers of dimensions."""
    found = []
    for size, own in zip(sizes, dimensions, strict=True):
        product = reduce(mul, (Fraction(own[name]) ** e for name, e in powers.items()), Fraction(1))
        found.append(Fraction(size) / product)
    return found


def _sorted(powers: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, e) for name, e in powers.items() if e))


def _sum(sizes: Sequence[int], dimensions: Sequence[Dimensions], powers: list[dict[str, int]]) -> Size:
    names = set().union(*powers)
    # A sum may have the primes of a dimension by chance: then one of the recordings tells what is shared.
    common = {name: min(each.get(name, 0) for each in powers) for name in names}
    readings = [common, *sorted(powers, key=_rounded)]
    tried: list[dict[str, int]] = []
    for reading in readings:
        every = {name: exponent for name, exponent in reading.items() if exponent}
        # Primes of ranks may be in all terms by chance, as sides are multiples of ranks.
        for shared in (every, {name: exponent for name, exponent in every.items() if name not in RANKS}):
            if shared in tried:
                continue
            tried.append(shared)
            found = _shared_sum(sizes, dimensions, shared)
            if found is not None:
                return found
    raise UnknownSizeError(f"sizes {list(sizes)} are no sum of {MOST_TERMS} products of dimensions")


def _shared_sum(
    sizes: Sequence[int], dimensions: Sequence[Dimensions], shared: Mapping[str, int]
) -> Size | None:
    """The sum that is some powers times small terms; none where there is none."""
    rests = _rests(sizes, dimensions, shared)
    names = [name for name in dimensions[0] if len({own[name] for own in dimensions}) > 1]
    # Few summands first: sums of products of two are seldom, and many.
    alone: list[Summand] = [((),), *(((name,),) for name in names)]
    pairs: list[Summand] = [(pair,) for pair in combinations_with_replacement(names, 2)]
    # One recording more than there are coefficients is their proof.
    most = len(sizes) - 1
    for summands, counts in (
        (alone, range(1, 2)),
        (_wholes(dimensions[0]), range(1, 2)),
        (alone, range(2, min(MOST_TERMS, most) + 1)),
        ([*alone, *pairs], range(1, min(2, most) + 1)),
    ):
        columns = [
            [sum(prod(own[name] for name in part) for part in summand) for own in dimensions]
            for summand in summands
        ]
        for count in counts if columns else ():
            sums = [
                (solved, chosen)
                for chosen in _dependent(columns, rests, count)
                if (solved := _solved([list(map(Fraction, columns[place])) for place in chosen], rests))
            ]
            if sums:
                # Primes may be as far apart as others are: small coefficients tell what is meant.
                solved, chosen = min(sums, key=lambda one: sum(c.numerator + c.denominator for c in one[0]))
                parts = ((c, Counter(summands[p])) for c, p in zip(solved, chosen, strict=True))
                return tuple(_term(c * n, part, shared) for c, own in parts for part, n in own.items())
    return None


def _wholes(dimensions: Dimensions) -> list[Summand]:
    """Sums of dimensions that are there."""
    return [
        tuple((name,) if name else () for name in whole)
        for whole in WHOLES
        if all(name in dimensions or name == ONE for name in whole)
    ]


def _dependent(columns: Sequence[Sequence[int]], rests: Sequence[Fraction], count: int) -> list[list[int]]:
    """Choices of `count` columns, in order, that may add up to the rests.

    Determinants of these columns with the rests are 0 modulo a prime, which is quicker to see than fractions.
    """
    scale = lcm(*(rest.denominator for rest in rests))
    sides = np.array([[side % MODULUS for side in column] for column in columns], dtype=np.int64)
    sums = np.array([int(rest * scale) % MODULUS for rest in rests], dtype=np.int64)
    chosen = np.array(list(combinations(range(len(columns)), count)), dtype=np.intp).reshape(-1, count)
    fits = np.ones(len(chosen), dtype=bool)
    for last in range(count, len(rests)):
        rows = [*range(count), last]
        vectors = [*(sides[chosen[:, place]][:, rows] for place in range(count)), sums[rows][None]]
        fits &= _determinants(vectors) == 0
    found: list[list[int]] = chosen[fits].tolist()
    return found


def _determinants(vectors: Sequence[Ints]) -> Ints:
    """Determinants modulo a prime of matrices whose columns these are, [matrices, rows] each."""
    if len(vectors) == 1:
        return vectors[0][:, 0]
    total: Ints = np.zeros(1, dtype=np.int64)
    for row in range(len(vectors)):
        others = [np.delete(vector, row, axis=1) for vector in vectors[1:]]
        term = vectors[0][:, row] * _determinants(others) % MODULUS
        total = (total - term if row % 2 else total + term) % MODULUS
    return total


def _term(coefficient: Fraction, factor: Sequence[str], shared: Mapping[str, int]) -> Term:
    powers = dict(shared)
    for name in factor:
        powers[name] = powers.get(name, 0) + 1
    return Term(coefficient.numerator, coefficient.denominator, _sorted(powers))


def _solved(columns: list[list[Fraction]], rests: list[Fraction]) -> list[Fraction] | None:
    """Small coefficients, none of them 0, with which columns add up to the rests, or None."""
    count = len(columns)
    rows = [[column[i] for column in columns] + [rests[i]] for i in range(len(rests))]
    for place in range(count):
        pivot = next((row for row in rows[place:] if row[place]), None)
        if pivot is None:
            return None
        rows.remove(pivot)
        rows.insert(place, [value / pivot[place] for value in pivot])
        for other in range(len(rows)):
            if other != place and rows[other][place]:
                factor = rows[other][place]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[place], strict=True)]
    if any(row[count] for row in rows[count:]):
        return None
    found = [row[count] for row in rows[:count]]
    if any(not c or c < 0 or max(c.numerator, c.denominator) > LARGEST_COEFFICIENT for c in found):
        return None
    return found
