"""Primes that tell the dimensions of a set of sizes apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count

SMALLEST = 11
"""Of a number of tokens whose largest prime tells it from others."""


class Primes:
    """The prime of each dimension.

    Args:
        primes: of dimensions.
        others: that no dimension may have besides.
    """

    def __init__(self, primes: dict[str, int], others: Iterable[int]) -> None:
        self.of = primes
        self.taken = {*primes.values(), *others}

    def is_free(self, value: int) -> bool:
        """Whether a number is a prime that nobody has."""
        return value not in self.taken and is_prime(value)

    def fresh(self, name: str, least: int) -> int:
        """The smallest prime that is at least so large and that nobody has, for a dimension."""
        found = next(value for value in count(least) if self.is_free(value))
        self.taken.add(found)
        self.of[name] = found
        return found

    def take(self, values: Mapping[str, int]) -> bool:
        """Let the largest primes of some numbers be those of dimensions, where nothing else has them."""
        found = {name: largest_prime(value) for name, value in values.items()}
        known = self.taken - {self.of.get(name) for name in values}
        for name, prime in found.items():
            others = (value for other, value in values.items() if other != name)
            if prime < SMALLEST or prime in known or any(value % prime == 0 for value in others):
                return False
        self.of |= found
        self.taken |= {*found.values()}
        return True


def largest_prime(value: int) -> int:
    """The largest prime that divides a number; 1 of 1."""
    found, divisor = 1, 2
    while divisor * divisor <= value:
        while value % divisor == 0:
            value, found = value // divisor, divisor
        divisor += 1
    return max(value, found)


def is_prime(value: int) -> bool:
    """Whether a number is one."""
    return value > 1 and all(value % divisor for divisor in range(2, int(value**0.5) + 1))
