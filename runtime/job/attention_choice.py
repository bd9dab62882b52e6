"""The choice of the kernel of causal attention for a job, by a trial on its first GPU.

A layer's call that PyTorch decides is `scaled_dot_product_attention` of whole sequences without a mask. Other
calls name their kernel: windows, sinks, and sequences of which a rank holds a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from runtime.model.attention_switches import (
    PACKAGES,
    PREFERENCE,
    default_kernel,
    offered_kernels,
    settle_order,
)
from runtime.model.number_formats import DTYPES
from runtime.parallel.attention_trial import AttentionCall, Trial, operands, trial
from runtime.parallel.ranks import run_on_first_rank

AUTO = "auto"
"""The value of --attention-kernel that asks for a trial."""

LEAST_GAIN = 0.03
"""Least share of the time by which another kernel must be faster than PyTorch's own choice."""

MORE_HELD, MORE_AT_PEAK = 1.01, 1.1
"""Most bytes of another kernel between forward and backward, and at its peak, relative to PyTorch's choice.
Dry runs count what is held; workspaces of kernels are in the margin of estimates."""

LEAST_TOKENS = 16
"""Shortest sequence with a trial."""


class Choice(NamedTuple):
    """The kernel of a job."""

    kernel: str | None
    """None for PyTorch's own choice."""
    line: str = ""
    """A line for the user, where the choice is not PyTorch's."""


class Calls(NamedTuple):
    """Calls of attention of one microbatch on one rank."""

    plain: Counter[AttentionCall]
    """Calls whose kernel PyTorch chooses, with the number of layers."""
    names_flash: bool
    """Other layers call the flash operators by name."""


def attention_calls(spec: ModelSpec, layout: Layout, has_masks: bool) -> Calls:
    """Calls of all layers of a model, as if a rank had all of them.

    Args:
        has_masks: attention keeps to documents, by masks.
    """
    plain: Counter[AttentionCall] = Counter()
    kinds = [spec.layer_kind(layer).attention for layer in range(spec.layers)]
    softmax = [kind for kind in kinds if kind in ("full", "window", "chunk")]
    exchanges = layout.context_parallel > 1 and layout.context_parallel_form == "all_to_all"
    for kind in softmax:
        is_named = spec.attention_softcap or spec.attention_sinks
        is_named = is_named or (layout.context_parallel > 1 and not exchanges)
        if is_named or (kind == "window" and not spec.reaches_all(kind)):
            continue
        plain[_call(spec, layout, kind == "chunk" and not spec.reaches_all(kind), exchanges)] += 1
    if has_masks:
        return Calls(Counter(), bool(softmax))
    return Calls(plain, plain.total() < len(softmax))


def _call(spec: ModelSpec, layout: Layout, in_chunks: bool, exchanges: bool) -> AttentionCall:
    tp, cp = layout.tensor_parallel, layout.context_parallel if exchanges else 1
    heads, kv_heads = spec.heads // tp, max(1, spec.kv_heads // tp)
    head = value = spec.head_dim
    latent = spec.latent_attention
    if latent is not None:
        kv_heads = heads
        head, value = latent.qk_nope_head_dim + latent.qk_rope_head_dim, latent.v_head_dim
    if exchanges:
        # Heads are padded to one size, and repeated until each rank has some.
        head = value = max(head, value)
        kv_heads = _least_multiple(kv_heads, cp) // cp
        heads //= cp
    batch, seq = layout.micro_batch_size, spec.seq
    if in_chunks:
        batch, seq = batch * -(-seq // spec.window), spec.window
    dtype, tokens_first = DTYPES[layout.precision], latent is None or exchanges
    return AttentionCall(batch, heads, kv_heads, seq, head, value, dtype, tokens_first)


def _least_multiple(number: int, of: int) -> int:
    return next(times * number for times in range(1, of + 1) if times * number % of == 0)


def tried(names: Iterable[str], measure: Callable[[str], Trial]) -> tuple[dict[str, Trial], dict[str, str]]:
    """Trials of the kernels that ran and were right, and the reasons against the others."""
    trials, failures = {}, {}
    for name in names:
        try:
            trials[name] = measure(name)
        except Exception as error:  # Of packages that others wrote: a kernel that raises is not used.
            failures[name] = str(error).partition("\n")[0] or type(error).__name__
    return trials, failures


def fastest(default: str, trials: Mapping[str, Trial]) -> str:
    """The fastest kernel that needs no more memory than PyTorch's choice; that choice where none is clearly
    faster."""
    own = trials.get(default)
    fitting = {
        name: found
        for name, found in trials.items()
        if own is None or (found.held <= own.held * MORE_HELD and found.peak <= own.peak * MORE_AT_PEAK)
    }
    if not fitting:
        return default
    best = min(fitting, key=lambda name: fitting[name].seconds)
    is_faster = own is None or fitting[best].seconds < own.seconds * (1 - LEAST_GAIN)
    return best if is_faster else default


def choose(asked: str, calls: Calls, device: torch.device, names: Iterable[str]) -> Choice:
    """The kernel of this rank's trial.

    Args:
        asked: a kernel, or `AUTO`.
        names: the kernels to try.

    Raises:
        InputError: the kernel that was asked for does not run.
    """
    try:
        given = {call: operands(call, device) for call in calls.plain}
        default = default_kernel(*next(iter(given.values()))[:3])
    except RuntimeError as error:
        if asked != AUTO:
            raise InputError(f"--attention-kernel {asked}: {str(error).partition(chr(10))[0]}") from error
        return Choice(None)

    def measure(name: str) -> Trial:
        found = [(trial(own, name), calls.plain[call]) for call, own in given.items()]
        return Trial(
            sum(one.seconds * count for one, count in found) / calls.plain.total(),
            sum(one.held * count for one, count in found),
            max(one.peak for one, _ in found),
        )

    if asked != AUTO:
        trials, failures = tried([asked], measure)
        if failures:
            raise InputError(
                f"--attention-kernel {asked}: it does not run on this job's attention ({failures[asked]}); "
                "give another one, or leave it out"
            )
        return Choice(asked, f"attention kernel: {asked}, {_milliseconds(trials[asked])} of a layer")
    trials, _ = tried(names, measure)
    best = fastest(default, trials)
    if best == default:
        return Choice(None)
    own = trials.get(default)
    beside = f", where PyTorch's {default} takes {_milliseconds(own)}" if own else ""
    return Choice(
        best,
        f"attention kernel: {best}, {_milliseconds(trials[best])} forward and backward of a layer{beside}; "
        f"--attention-kernel {best} keeps it when the run goes on",
    )


def _milliseconds(found: Trial) -> str:
    return f"{found.seconds * 1e3:.3g} ms"


def use_attention(
    asked: str, spec: ModelSpec, layout: Layout, device: torch.device, has_masks: bool = False
) -> str:
    """Let attention run by the kernel that the first rank's trial finds, or that is asked for, on all ranks.

    Returns:
        A line for the user, or an empty text.

    Raises:
        InputError: the kernel that was asked for does not run.
    """
    calls = _calls_of_job(asked, spec, layout, device, has_masks)
    if calls is None:
        return ""
    PREFERENCE.use(None)
    settle_order(device)
    mine = offered_kernels(device, not calls.names_flash)
    offers: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(offers, mine)
    names = [name for name in mine if all(name in offer for offer in offers)]
    try:
        choice = run_on_first_rank(lambda: choose(asked, calls, device, names))
    finally:
        _clean(device)
    return _apply(choice, asked)


def use_attention_alone(spec: ModelSpec, layout: Layout, device: torch.device) -> None:
    """Like `use_attention`, for one rank of a job whose other ranks do not run."""
    calls = _calls_of_job(AUTO, spec, layout, device, has_masks=False)
    if calls is None:
        return
    PREFERENCE.use(None)
    settle_order(device)
    choice = choose(AUTO, calls, device, offered_kernels(device, not calls.names_flash))
    _clean(device)
    PREFERENCE.use(choice.kernel)


def _calls_of_job(
    asked: str, spec: ModelSpec, layout: Layout, device: torch.device, has_masks: bool
) -> Calls | None:
    """The calls of a job that has a choice; None for others."""
    is_possible = device.type == "cuda" and torch.cuda.is_available()
    calls = attention_calls(spec, layout, has_masks)
    if asked != AUTO:
        if not is_possible:
            raise InputError(f"--attention-kernel {asked}: device {device} has one kernel; leave it out")
        if not calls.plain:
            raise InputError(
                f"--attention-kernel {asked}: no layer of this job has attention of whole sequences "
                "without a mask, whose kernel can be chosen; leave it out"
            )
        if asked in PACKAGES and calls.names_flash:
            raise InputError(
                f"--attention-kernel {asked}: other layers of this job call PyTorch's flash kernel, which it "
                "would replace; leave it out"
            )
        return calls
    sizes = {call.seq for call in calls.plain}
    is_narrow = DTYPES[layout.precision] != torch.float32
    return calls if is_possible and is_narrow and sizes and min(sizes) >= LEAST_TOKENS else None


def _clean(device: torch.device) -> None:
    """Free what a trial has cached; the peaks that runs report begin after it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def _apply(choice: Choice, asked: str) -> str:
    """Let all ranks use the chosen kernel, or none of them."""
    reason = ""
    try:
        PREFERENCE.use(choice.kernel)
    except Exception as error:  # Of packages that others wrote.
        reason = f"rank {dist.get_rank()} cannot use {choice.kernel}: {str(error).partition(chr(10))[0]}"
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    found = next(filter(None, reasons), "")
    if not found:
        return choice.line
    PREFERENCE.use(None)
    if asked != AUTO:
        raise InputError(f"--attention-kernel {asked}: {found}; give flash, cudnn or efficient")
    return f"attention kernel: PyTorch's own choice, as {found}"
