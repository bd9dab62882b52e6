"""Tapes under a layout in which FSDP2 manages no parameters (`runtime.parallel.working_copies`): they compute
as plain tensors, while tapes are recorded with those that FSDP2 gives."""

from functools import lru_cache

from costmodels.tapes.player.casts import computes_one_by_one
from costmodels.tapes.tape import BACKWARD_END, EXPERTS, Allocation, Gradient, Mark, Release, Tape

END = Mark(EXPERTS + BACKWARD_END)


def with_plain_parameters(tape: Tape) -> Tape:
    """The tape of a unit whose experts' gradients are taken when the last of them has been put together of
    those of experts that compute one by one: a plain tensor has no operation in between (`to_local`), which
    would come after that for the gradient of rows."""
    is_loop = any(map(computes_one_by_one, tape.parameters))
    return _with_early_end(tape) if is_loop and END in tape.backward else tape


@lru_cache(maxsize=256)
def _with_early_end(tape: Tape) -> Tape:
    events = [event for event in tape.backward if event != END]
    experts = {number for number, one in enumerate(tape.parameters) if one.group == EXPERTS}
    given = {one.storage for one in events if isinstance(one, Gradient) and one.parameter in experts}
    place = 1 + max(n for n, one in enumerate(events) if isinstance(one, Allocation) and one.storage in given)
    while isinstance(events[place], Release):
        place += 1
    events.insert(place, END)
    return tape._replace(backward=tuple(events))
