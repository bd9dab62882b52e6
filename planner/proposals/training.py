"""Changes of training that need fewer bytes: optimizers, adapters, shorter sequences, number formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from costmodels.errors import InputError
from costmodels.spec.hardware import Precision
from costmodels.spec.model_parts import LORA_TARGETS, Lora
from planner.inputs.engine import resolve_precision
from planner.inputs.model import with_lora, with_seq
from planner.inputs.pins import Pins
from planner.problem import Problem
from planner.proposals.fits import may_fit
from planner.proposals.pins import keywords_of_pins
from planner.proposals.proposal import Changed
from planner.space.engine_rules import check_pins
from planner.space.lora_rules import check_engine, check_precision

BITS: dict[Precision, int] = {
    "fp32": 32,
    "tf32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "mxfp8": 8,
    "nvfp4": 4,
}
"""Bits of an element in GEMMs, by number format."""

SHORTEST = 256
"""Tokens of the shortest sequence in a proposal."""

RANK = 16
"""Rank of the adapters in a proposal."""


def optimizers(problem: Problem) -> Iterator[Changed]:
    """A change to Adam with 8-bit states, if the engine has it."""
    pins: Pins = {**problem.pins, "optimizer": "adam8bit"}
    if "optimizer" in problem.pins or problem.model.lora is not None or not _is_legal_pin(problem, pins):
        return
    yield Changed(
        "optimizer",
        "with Adam in 8 bits",
        ("--optimizer", "adam8bit"),
        keywords_of_pins(problem, pins),
        replace(problem, pins=pins),
    )


def _is_legal_pin(problem: Problem, pins: Pins) -> bool:
    try:
        check_pins(problem.engine, pins)
    except InputError:
        return False
    return True


def adapters(problem: Problem) -> Iterator[Changed]:
    """Changes to adapters, with the frozen model in full precision and in 4 bits."""
    old = problem.model.lora
    usual = Lora(rank=RANK, alpha=2.0 * RANK, targets=LORA_TARGETS) if old is None else old
    flags = ("--lora-rank", str(RANK)) if old is None else ()
    if old is None:
        yield from _with_adapters(problem, usual, "to fine-tune, with adapters (LoRA)", flags)
    if usual.quantize_base is None:
        packed = usual.model_copy(update={"quantize_base": "nf4"})
        what = "with a base in 4 bits" if old else "to fine-tune, with adapters on a base in 4 bits (QLoRA)"
        yield from _with_adapters(problem, packed, what, (*flags, "--quantize-base", "nf4"))


def _with_adapters(problem: Problem, lora: Lora, what: str, flags: tuple[str, ...]) -> Iterator[Changed]:
    try:
        model = with_lora(problem.model, lora)
        check_precision(model, problem.precision)
        check_engine(model, problem.engine)
    except InputError:
        return  # Its layers have none, or its software does not.
    yield Changed("adapters", what, flags, {"model": model, "lora": None}, replace(problem, model=model))


def sequences(problem: Problem) -> Iterator[Changed]:
    """Changes to shorter sequences, the longest first: the given length over powers of two, and three
    quarters of these."""
    seq = problem.model.seq
    lengths = {seq * part // (4 << power) for part in (2, 3) for power in range(seq.bit_length())}
    wanted = sorted((one for one in lengths if SHORTEST <= one < seq and one % 64 == 0), reverse=True)
    if not wanted or not may_fit(_of_length(problem, wanted[-1]).problem):
        return
    yield from (_of_length(problem, length) for length in wanted)


def _of_length(problem: Problem, length: int) -> Changed:
    model = with_seq(problem.model, length)
    what = f"with sequences of {length} tokens"
    flags: tuple[str, ...] = ("--seq-length", str(length))
    if model.position == "learned":
        # The table of a model that flags describe would shrink with its sequences.
        flags += ("--max-position-embeddings", str(model.max_positions))
    return Changed("sequence", what, flags, {"model": model}, replace(problem, model=model))


def precisions(problem: Problem) -> Iterator[Changed]:
    """Changes to number formats of fewer bits that device and engine support, the widest first."""
    device, bits = problem.cluster.device, BITS[problem.precision]
    usual = resolve_precision(None, device, problem.engine)
    if BITS[usual] < bits:
        what = f"in {usual} instead of {problem.precision}"
        yield _in_format(problem, usual, what, ("--unpin", "precision"))
        return
    if problem.precision != usual:
        return  # A flag says it, beside which another one would contradict it.
    for kind in sorted(get_args(Precision), key=lambda kind: -BITS[kind]):
        if BITS[kind] < bits and kind in device.peak_flops and kind in problem.engine.memory:
            yield _in_format(problem, kind, f"in {kind} instead of {usual}", (f"--{kind}",))


def _in_format(problem: Problem, kind: Precision, what: str, flags: tuple[str, ...]) -> Changed:
    changed = replace(problem, precision=kind)
    return Changed("precision", what, flags, keywords_of_pins(changed, problem.pins), changed)
