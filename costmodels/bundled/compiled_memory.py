"""Memory of a compiled function: what `runtime.dryrun.compiled_layers` makes of a graph, of names of sizes.

Kernels, reductions and results have buffers; what is element-wise has one only if a kernel reads it or the
function returns it, else its readers read what it reads. A buffer lives to its last reader.
"""

from __future__ import annotations

from costmodels.bundled.compiled_graph import INLINED, INPUT, PART, READS_BUFFERS, SUM, Program, Value
from costmodels.bundled.replay import COMMUNICATION, Storage, Tape

Held = dict[Value, list[Storage]]
"""Memory of values that are there."""


class Plan:
    """When each value of a program has memory."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.read_as_buffer = {
            arg
            for value in program.values
            if self.kind(value) in (*READS_BUFFERS, PART)
            for arg in value.args
        } | set(program.outputs)
        self.reads: dict[Value, set[Value]] = {}
        for value in program.values:
            own: set[Value] = set()
            for arg in value.args if self.kind(value) != INPUT else ():
                if self.has_memory(arg):
                    own.add(arg)
                if self.kind(arg) == PART or not self.has_memory(arg):
                    own |= self.reads[arg]
            self.reads[value] = own
        self.last: dict[Value, list[Value]] = {}
        """Values that nothing reads after a value."""
        alive = set(program.outputs)
        for output in program.outputs:
            alive |= self.reads[output] if self.kind(output) == PART else set()
        for value in reversed(program.values):
            if not self.has_memory(value):
                continue
            self.last[value] = [one for one in self.reads[value] if one not in alive]
            alive |= self.reads[value]
            if value not in alive:
                self.last[value].append(value)

    def kind(self, value: Value) -> str:
        """What a value is to this program."""
        return INPUT if value in self.program.inputs else value.kind

    def has_memory(self, value: Value) -> bool:
        """Whether a value is in memory."""
        return self.kind(value) != INLINED or value in self.read_as_buffer

    def is_in_place(self, value: Value) -> bool:
        """Whether a sum over ranks is written over what it sums."""
        return self.kind(value) == SUM and (
            value.args[0] in self.last[value] and self.kind(value.args[0]) != INPUT
        )


def run(tape: Tape, program: Program, held: Held) -> list[Storage]:
    """Memory of the outputs of a program, which empties `held`, the memory of its inputs."""
    plan = Plan(program)
    for value in program.values:
        kind = plan.kind(value)
        if not plan.has_memory(value):
            continue
        if kind == PART:
            held[value] = [held[value.args[0]][value.index]]
        elif kind != INPUT:
            if plan.is_in_place(value):
                held[value] = held[value.args[0]]
            else:
                made = COMMUNICATION if value.is_message or kind == SUM else None
                held[value] = [Storage(tape, size, made) for size in value.sizes]
        if kind != INPUT:
            for dead in plan.last[value]:
                held.pop(dead, None)
    outputs = [held[value][0] for value in program.outputs]
    held.clear()
    return outputs
