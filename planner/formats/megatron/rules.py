"""Rules of Megatron-LM and MindSpeed: refused or ignored flags, named with their line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from costmodels.dataclass import dataclass
from costmodels.spec.model import ModelSpec
from planner.formats.facts.keyed import decimal
from planner.formats.facts.launcher import Launch
from planner.formats.facts.reading import Problems, Severity
from planner.formats.megatron.dispatch import OVERLAP
from planner.formats.megatron.model import Given
from planner.formats.megatron.pairs import broken_pairs
from planner.space.kind_rules import has_windows

TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))


@dataclass(frozen=True)
class _Facts:
    given: Given
    model: ModelSpec
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    chunks: int
    form: str
    sequence_parallel: bool
    micro: int
    batch: int | None
    world: int | None
    framework: str
    connections: str | None

    def has(self, *names: str) -> bool:
        """Return whether any flag of `names` is given."""
        return any(name in self.given for name in names)

    def words(self, name: str) -> list[str]:
        """The words that a flag gives, in a list with commas too; none where it is not given."""
        flag = self.given.get(name)
        return [] if flag is None else [one for word in flag.values for one in word.text.split(",")]

    def number(self, name: str) -> float | None:
        """The number that a flag gives; None where it gives none."""
        flag = self.given.get(name)
        text = flag.text if flag is not None and not flag.unknown else ""
        return decimal(text)


OTHER_ATTENTION = ("mindspeed", "megatron-deepspeed")
"""Software that does not use Transformer Engine's attention."""

Fault = tuple[Severity, str, str, str]
"""An error: severity, flag, description and correction."""


def check_rules(
    given: Given,
    model: ModelSpec,
    degrees: dict[str, Any],
    world: int | None,
    batch: int | None,
    framework: str,
    launch: Launch,
    problems: Problems,
) -> None:
    """Add the errors of flags to `problems`.

    Args:
        degrees: fields of `Layout`, except those that depend on the number of devices.
        world: devices of the job; None where unknown. batch: sequences of a step; None where unknown.
    """
    if any(problem.severity == "unknown" for problem in problems.found):
        # Rules about degrees wait until the degrees are known; a flag that needs another one is judged at
        # once.
        for flag, text, remedy in [] if framework == "megatron-deepspeed" else broken_pairs(given):
            line = given[flag].line if flag in given else None
            problems.add("illegal", text, flag, line, remedy, certain=True)
        return
    connections = launch.cuda_connections
    facts = _Facts(
        given=given,
        model=model,
        tp=degrees["tensor_parallel"],
        pp=degrees["pipeline_parallel"],
        cp=degrees["context_parallel"],
        ep=degrees["expert_parallel"],
        etp=degrees["expert_tensor_parallel"],
        chunks=degrees["virtual_pipeline_parallel"],
        form=degrees.get("context_parallel_form", ""),
        sequence_parallel=degrees["sequence_parallel"],
        micro=degrees["micro_batch_size"],
        batch=batch,
        world=world,
        framework=framework,
        connections=None if connections is None or connections.unknown else connections.text,
    )
    for severity, flag, text, remedy in (*_sizes(facts), *_features(facts)):
        problems.add(severity, text, flag, given[flag].line if flag in given else None, remedy)


def _sizes(f: _Facts) -> Iterator[Fault]:
    """Errors of numbers that must divide each other."""
    m, shards = f.model, f.tp * f.pp * f.cp
    if f.world is not None and f.world % shards:
        blamed = max(((f.tp, TP), (f.pp, PP), (f.cp, CP)), key=lambda pair: pair[0])[1]
        cut = f"tensor {f.tp} x pipeline {f.pp} x context {f.cp} = {shards}"
        text = f"{f.world} devices are not a multiple of {cut}"
        yield "illegal", blamed, text, ""
    if m.heads % f.tp:
        yield "illegal", TP, f"{f.tp} does not divide the {m.heads} attention heads", _divisors(m.heads, f.tp)
    elif m.kv_heads % f.tp and f.tp % m.kv_heads and m.latent_attention is None:
        text = f"{m.kv_heads} query groups are neither a multiple nor a divisor of tensor parallelism {f.tp}"
        yield "illegal", "--num-query-groups", text, ""
    if f.cp > 1 and m.seq % (2 * f.cp):
        text = f"the sequence of {m.seq} tokens is not divisible by 2 x {f.cp}"
        yield "illegal", CP, text, ""
    if f.form == "all_to_all" and m.heads % (f.tp * f.cp):
        text = f"Ulysses needs attention heads ({m.heads}) divisible by tensor {f.tp} x context {f.cp}"
        yield "illegal", CP, text, "use a ring"
    if f.cp > 1 and f.framework not in OTHER_ATTENTION:
        yield from _attention_of_context(f)
    if f.sequence_parallel and m.seq % f.tp:
        yield "illegal", "--sequence-parallel", f"{m.seq} tokens are not divisible by {f.tp}", ""
    if m.experts and m.experts % f.ep:
        name = "--expert-model-parallel-size"
        yield "illegal", name, f"{f.ep} does not divide the {m.experts} experts", _divisors(m.experts, f.ep)
    if f.world is not None and f.world % shards == 0:
        yield from _of_replicas(f, f.world // shards)


def _attention_of_context(f: _Facts) -> Iterator[Fault]:
    """Errors of attention that Transformer Engine does not support with context parallelism."""
    for text, remedy in refused_attention(f.model, f.form, f.tp, f.cp):
        yield "illegal", CP, text, remedy


def refused_attention(model: ModelSpec, form: str, tp: int, cp: int) -> Iterator[tuple[str, str]]:
    """Reasons why Transformer Engine does not run a model with context parallelism, each with a remedy.

    Args:
        form: a value of `Layout.context_parallel_form`.
    """
    # Keys of a tensor-parallel rank, before ranks exchange them.
    heads = model.heads if model.latent_attention is not None else model.kv_heads
    keys = max(heads // tp, 1)
    if form == "all_to_all" and model.heads % (tp * cp) == 0 and keys % cp:
        groups = f"the {keys} query groups of a tensor-parallel rank"
        text = f"{cp} does not divide {groups}, which Transformer Engine repeats for no exchange"
        yield text, "use --cp-comm-type p2p or all_gather"
    if form == "ring" and has_windows(model):
        text = "Transformer Engine has no sliding windows with --cp-comm-type p2p"
        yield text, "use --cp-comm-type all_gather or a2a"
    if form != "all_to_all" and model.attention_sinks:
        text = "Transformer Engine has attention sinks with --cp-comm-type a2a alone"
        yield text, "use --cp-comm-type a2a"


def _of_replicas(f: _Facts, replicas: int) -> Iterator[Fault]:
    ranks = f.world or 1
    if f.ep > 1 and ranks // f.pp % (f.ep * f.etp):
        name = "--expert-model-parallel-size"
        stage = ranks // f.pp
        text = f"{f.ep} x expert tensor parallelism {f.etp} does not divide the {stage} devices of a stage"
        yield "illegal", name, text, ""
    unit = f.micro * replicas
    if f.batch is None:
        return
    if f.batch % unit:
        near = [size for size in (f.batch // unit * unit, (f.batch // unit + 1) * unit) if size]
        text = f"{f.batch} is not a multiple of microbatch {f.micro} x {replicas} data-parallel replicas"
        yield "illegal", "--global-batch-size", text, f"use {' or '.join(map(str, near))}"
        return
    count = f.batch // unit
    if f.chunks > 1:
        yield from _of_groups(f, count, unit)


GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


def _of_groups(f: _Facts, count: int, unit: int) -> Iterator[Fault]:
    """Errors of interleaved groups of microbatches; the last group must fill the pipeline too."""
    said = f.number(GROUP)
    group = f.pp if said is None else int(said)
    if group < f.pp or group > count:
        text = f"{group} is not between the {f.pp} pipeline ranks and the {count} microbatches"
        yield "illegal", GROUP if said is not None else "--global-batch-size", text, ""
    elif 0 < count % group < f.pp:
        text = f"interleaving needs microbatches in multiples of {group}"
        text += " pipeline ranks" if group == f.pp else f", or {f.pp} or more besides"
        yield "illegal", "--global-batch-size", f"{text}, not {count}", f"use a multiple of {unit * group}"
    elif count % f.pp:
        text = f"{count} microbatches in groups of {group} are not priced"
        yield "unknown", GROUP, text, f"use a multiple of {unit * f.pp} sequences"


def _divisors(number: int, near: int) -> str:
    fits = [size for size in range(1, min(number, 4096) + 1) if number % size == 0]
    below = [size for size in fits if size < near][-1:]
    return "use " + " or ".join(map(str, [*below, *[size for size in fits if size > near][:1]]))


def _features(f: _Facts) -> Iterator[Fault]:
    """Errors of flags that require or exclude other flags."""
    m = f.model
    if f.has("--bf16") and f.has("--fp16"):
        yield "illegal", "--fp16", "and --bf16 are given both", "leave one out"
    if f.has("--train-iters") and f.has("--train-samples"):
        yield "illegal", "--train-samples", "and --train-iters are given both", "leave one out"
    if f.framework != "megatron-deepspeed":
        for flag, text, remedy in broken_pairs(f.given):
            yield "illegal", flag, text, remedy
    if f.ep > 1 and f.has("--fp16") and f.framework == "megatron":
        yield "note", "--fp16", "goes with expert parallelism since Megatron-LM core 0.16 alone", ""
    elif f.ep > 1 and f.has("--fp16") and f.framework != "megatron-deepspeed":
        yield "illegal", "--fp16", "does not go with expert parallelism", "use --bf16"
    yield from _numbers(f)
    if m.experts and f.tp > 1 and not f.sequence_parallel and f.framework != "megatron-deepspeed":
        text = f"experts with tensor parallelism {f.tp} need it"
        yield "illegal", "--sequence-parallel", text, "add --sequence-parallel"
    if f.ep > 1 and not m.experts:
        text = "there are no experts to spread"
        yield "illegal", "--expert-model-parallel-size", text, "add --num-experts, or leave it out"
    if f.has("--sequence-parallel") and f.tp == 1:
        yield "note", "--sequence-parallel", "has no effect with tensor parallelism 1", ""
    if f.chunks > 1 and f.pp == 1:
        name = next((one for one in _CHUNKS if f.has(one)), _CHUNKS[0])
        yield (
            "illegal",
            name,
            "chunks of a pipeline need at least 2 pipeline ranks",
            f"raise {PP}, or leave it out",
        )
    optimizer = f.given["--optimizer"].text if f.has("--optimizer") else "adam"
    shards = f.has("--use-distributed-optimizer", "--use-megatron-fsdp") or optimizer == "dist_muon"
    fsdp = next((one for one in ("--use-torch-fsdp2", "--use-megatron-fsdp") if f.has(one)), None)
    if fsdp is not None and optimizer in ("muon", "dist_muon", "lion", "soap", "adaptive_muon"):
        yield "illegal", fsdp, f"has adam and sgd, not {optimizer}", "leave it out"
    if f.has("--overlap-param-gather") and not shards:
        yield "illegal", "--overlap-param-gather", "needs --use-distributed-optimizer", "add it"
    elif f.has("--overlap-param-gather") and not f.has("--overlap-grad-reduce"):
        yield "illegal", "--overlap-param-gather", "needs --overlap-grad-reduce", "add it"
    if f.has("--reuse-fp32-param") and not f.has("--bf16"):
        yield "illegal", "--reuse-fp32-param", "is about weights in bf16", "add --bf16"
    if f.has("--distribute-saved-activations") and (f.tp == 1 or f.sequence_parallel):
        text = "needs tensor parallelism of at least 2, and no sequence parallelism"
        yield "illegal", "--distribute-saved-activations", text, "leave it out"
    if f.has("--swap-attention") and f.has("--schedules-method"):
        yield "illegal", "--swap-attention", "does not go with DualPipe-V", "leave one out"
    if f.has("--moe-tp-extend-ep") and m.experts and m.experts % f.ep == 0 and f.tp == 1:
        yield "note", "--moe-tp-extend-ep", "has no effect with tensor parallelism 1", ""
    if f.has("--grad-reduce-in-bf16") and f.has("--accumulate-allreduce-grads-in-fp32"):
        text = "and --accumulate-allreduce-grads-in-fp32 contradict each other"
        yield "illegal", "--grad-reduce-in-bf16", text, "leave one out"
    yield from _exchange(f)
    yield from _connections(f)


_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")


def _numbers(f: _Facts) -> Iterator[Fault]:
    """Errors of values that must not exceed others."""
    least, most = f.number("--min-lr"), f.number("--lr")
    if least is not None and most is not None and least > most:
        yield "illegal", "--min-lr", f"{least:g} is more than --lr {most:g}", ""
    layers = f.number("--recompute-num-layers")
    stage = -(-f.model.layers // f.pp)
    if f.has("--recompute-granularity") and layers is not None and layers > stage:
        text = f"{layers:g} is more than the {stage} layers of a pipeline rank"
        method = f.given.get("--recompute-method")
        if method is not None and method.text == "block":
            # Nothing looks at the number but whether a layer is below it (transformer_block.py).
            yield "note", "--recompute-num-layers", f"{text}, which all recompute", ""
        else:
            yield "illegal", "--recompute-num-layers", text, f"use at most {stage}"
    sizes = f.given.get("--hierarchical-context-parallel-sizes")
    if sizes is not None and all(word.text.isdigit() and len(word.text) < 7 for word in sizes.values):
        product = math.prod(int(word.text) for word in sizes.values)
        if product != f.cp:
            yield "illegal", sizes.name, f"are {product} together, not {CP} {f.cp}", ""
    if f.has("--use-torch-fsdp2") and max(f.pp, f.ep) > 1:
        yield "illegal", "--use-torch-fsdp2", "goes with neither pipeline nor expert parallelism", ""


def _exchange(f: _Facts) -> Iterator[Fault]:
    """Errors of dispatch that passes of another microbatch hide (transformer_config.py)."""
    if not f.has(OVERLAP) or f.framework != "megatron":
        return
    if f.ep == 1:
        yield "illegal", OVERLAP, "needs expert parallelism", "leave it out"
    if f.pp > 1 and f.chunks == 1:
        name = _CHUNKS[1]
        yield "illegal", OVERLAP, "needs several chunks of each pipeline rank", f"add {name}, or leave it out"
    if f.words("--recompute-granularity") == ["full"]:
        yield "illegal", OVERLAP, "does not go with full recomputation", "leave one out"
    if "moe" in f.words("--recompute-modules"):
        text = f"does not go with {OVERLAP}, as moe recomputes dispatch"
        yield "illegal", "--recompute-modules", text, "leave moe out"
    if f.has(_SHARED):
        yield "illegal", _SHARED, f"and {OVERLAP} are given both", "leave one out"
    if not f.model.may_hide_dispatch:
        text = f"has one MTP module at most, not {f.model.mtp_depths}"
        yield "illegal", OVERLAP, text, "leave it out"


_SHARED = "--moe-shared-expert-overlap"


def _connections(f: _Facts) -> Iterator[Fault]:
    """Errors in the order of communication and kernels on GPUs before Blackwell."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    sharded = f.has("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")
    if sharded and f.connections == "1":
        yield "illegal", name, "is 1, which keeps FSDP from overlapping", f"leave {name} out"
    elif f.has(OVERLAP):
        return  # It asks for 32, and the parser leaves the choice between the two.
    elif f.framework == "megatron" and (f.tp > 1 or f.cp > 1) and not sharded and f.connections != "1":
        text = "is not set to 1 here: before Blackwell, tensor and context parallelism ask for it"
        yield "note", name, text, f"export {name}=1"
