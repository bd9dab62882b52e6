"""What FSDP2 and pipelines of PyTorch's versions do otherwise to memory."""

from typing import NamedTuple

from costmodels.pytorch import Version, parsed_version

NEWEST: Version = (2, 15)
"""The newest PyTorch whose ways are known."""


class Ways(NamedTuple):
    """What a version of PyTorch does."""

    keeps_locals: bool
    """Local variables of FSDP2 hold what it gathered last until it has copied what comes next, and the last
    gradient until all are reduced."""
    divides_copies: bool
    """A rank that has all of the parameters divides a copy of their gradients by a factor, be it 1."""
    casts_gradients: bool
    """Autograd makes gradients in the number format in which FSDP2 reduces them, one by one; else FSDP2
    converts those of a layer after its backward."""
    reduces_last_first: bool
    """A pipeline's stage reduces gradients from its last layer to the first, and those of its root then."""
    awaits_sends: bool
    """Messages of pipelines are there until somebody awaits that they are sent, and no longer; so are
    reductions, which takes a turn."""


WAYS: dict[Version, Ways] = {
    (2, 11): Ways(
        keeps_locals=True,
        divides_copies=True,
        casts_gradients=False,
        reduces_last_first=False,
        awaits_sends=False,
    ),
    (2, 15): Ways(
        keeps_locals=False,
        divides_copies=False,
        casts_gradients=True,
        reduces_last_first=True,
        awaits_sends=True,
    ),
}
"""By the first version that has them."""


def ways_of(version: str) -> Ways:
    """The ways of a version, of the newest in `WAYS` that is not newer."""
    return WAYS[max(first for first in WAYS if first <= parsed_version(version))]
