"""The layouts that a row of measurements may have had: one, or several where columns are blank.

Missing values are not assumed to be the fastest: `usual_choices` lists values that users of the engine
commonly choose, and every legal combination is one layout.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError

from benchmarks.calibration.published_cells import MOST_LAYERS, Unusable, count, note_value, number, switch
from benchmarks.calibration.published_splits import SPLITS
from costmodels.spec.hardware import Device
from costmodels.spec.layout import Layout, Optimizer
from costmodels.spec.model import ModelSpec

PRECISIONS = {
    "fp32": "fp32",
    "tf32": "tf32",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "nvfp4",
    "float8": "fp8",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
}
"""Spellings of number formats, without prefixes and suffixes (`amp_bf16`, `fp8 rowwise`)."""

SCHEDULES = {
    "1f1b": "1f1b",
    "1f1b-i": "interleaved",
    "1f1b-interleaved": "interleaved",
    "interleaved": "interleaved",
    "interleaved1f1b": "interleaved",
    "zbv": "zbv",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}
"""Spellings of schedules in the notes of rows that name one."""

OPTIMIZERS = tuple(name for name in get_args(Optimizer) if name != "adam")
"""Optimizers that are not Adam, by the beginnings of cells."""

MODULES = {
    "norm": "norm",
    "layernorm": "norm",
    "moe_act": "activation",
    "act": "activation",
    "activation": "activation",
    "mlp": "mlp",
    "moe": "mlp",
    "core_attn": "core_attention",
    "core_attention": "core_attention",
}
"""Modules that notes name as recomputed."""

KINDS = {"DP", "FSDP", "TP", "PP", "CP", "EP"}
"""Kinds of parallelism in the notes of rows whose method is named by them."""

MARGINAL = ("vpp", "mbs", "recompute", "sp", "zero_stage", "ep")
"""Columns of a layout that may be blank."""

MOST_COMBINATIONS = 256


def usual_choices(
    row: Mapping[str, str], usual: Mapping[str, Sequence[str]], model: ModelSpec, device: Device
) -> dict[str, tuple[str, ...]]:
    """Values that blank columns may have had, by column.

    Args:
        usual: what the users of the engine commonly choose.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in MARGINAL:
        if row.get(name) or name not in usual:
            continue
        sharded = name == "mbs" and _zero_number(row.get("zero_stage") or str(usual["zero_stage"][0])) == 3
        values: tuple[str, ...] = tuple(map(str, usual["mbs_sharded" if sharded else name]))
        if name == "ep":
            if not model.experts:
                continue
            values = tuple(str(min(int(value), model.experts)) for value in values)
            if _whole_experts(row):
                values = ("1",)
        if (name == "sp" and (number(row, "tp") or 1) == 1) or (name == "vpp" and _plain_pipeline(row)):
            values = ("0",) if name == "sp" else ("1",)
        found[name] = tuple(dict.fromkeys(values))
    if not row.get("precision"):
        found["precision"] = (str(usual.get("precision") or device.default_precision),)
    return found


def _whole_experts(row: Mapping[str, str]) -> bool:
    """Return whether the notes name a method by its kinds of parallelism, such as `FSDP` beside `FSDP + EP`,
    without EP."""
    kinds = {kind.strip().upper() for kind in (note_value(row, "method") or "").split("+")}
    return kinds <= KINDS and "EP" not in kinds


def _plain_pipeline(row: Mapping[str, str]) -> bool:
    """Return whether a row has one chunk a device: its source names plain 1F1B, or no schedule."""
    named = (note_value(row, "schedule") or "").lower()
    return number(row, "pp") == 1 or named in ("1f1b",)


def published_layouts(
    row: Mapping[str, str], choices: Mapping[str, Sequence[str]], model: ModelSpec, stages: str
) -> tuple[Layout, ...]:
    """The legal layouts of a row with each combination of `choices` for its blanks.

    Args:
        stages: name of the split of layers (`published_splits.SPLITS`).

    Raises:
        Unusable: none is legal, with the reason of the first.
    """
    layouts: list[Layout] = []
    reasons: list[Unusable] = []
    combinations = itertools.product(*choices.values())
    for values in itertools.islice(combinations, MOST_COMBINATIONS):
        try:
            layouts.append(_layout({**row, **dict(zip(choices, values, strict=True))}, model, stages))
        except Unusable as reason:
            reasons.append(reason)
    if not layouts:
        raise reasons[0]
    return tuple(dict.fromkeys(layouts))


def _layout(row: Mapping[str, str], model: ModelSpec, stages: str) -> Layout:
    tp, pp, cp, dp = _degrees(row)
    ep = count(row, "ep", None if model.experts else 1)
    vpp = 1 if _plain_pipeline(row) and not row.get("vpp") else count(row, "vpp")
    recompute, modules = _recompute(row)
    said = note_value(row, "modules") or ""
    if model.experts and "mlp" in said.split("+"):
        # Megatron's word for an MLP without experts; `moe` is one with experts.
        modules = tuple(module for module in modules if module != "mlp")
    optimizer = row.get("optimizer", "").lower()
    mbs, gbs = count(row, "mbs"), _batch(row, model)
    if pp * vpp > MOST_LAYERS:
        raise Unusable("more stages than layers")
    zero, replicas = _zero(row, dp * cp)
    split = SPLITS[stages](model, pp * vpp)
    layout: dict[str, Any] = {
        "tensor_parallel": tp,
        "sequence_parallel": tp > 1 and switch(row, "sp"),
        "pipeline_parallel": pp,
        "virtual_pipeline_parallel": vpp,
        "context_parallel": cp,
        # Megatron-Core's default of --cp-comm-type is p2p; all rows with context parallelism ran it.
        "context_parallel_form": "ring" if cp > 1 else "all_gather",
        "expert_parallel": ep,
        "expert_tensor_parallel": _expert_tensor_parallel(row, model, tp, tp * cp * dp),
        "data_parallel": dp,
        "zero_stage": zero,
        "zero_replicas": replicas,
        "schedule": _schedule(row, vpp),
        "micro_batch_size": mbs,
        "global_batch_size": gbs,
        "recompute": recompute,
        "recompute_modules": modules,
        **_block(row, max(split)),
        "precision": _precision(row),
        "optimizer": next((name for name in OPTIMIZERS if optimizer.startswith(name)), "adam"),
        "offload_optimizer": note_value(row, "offload_optimizer") == "1" or "on cpu" in optimizer,
        "offload_activations": note_value(row, "offload_activations") == "1",
        "layers_per_stage": [1] * (pp * vpp),
    }
    try:
        checked = Layout(**layout)
    except ValidationError as error:
        first = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise Unusable(f"layout not legal: {re.sub('[0-9]+', '#', first)}") from None
    # Other engines may leave a stage without layers, which a layout of ours may not.
    return checked.model_copy(update={"layers_per_stage": split})


def _degrees(row: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Tensor-, pipeline-, context- and data-parallel ranks; one of the last two follows from the others."""
    tp, pp, gpus = count(row, "tp"), count(row, "pp"), count(row, "gpus")
    dp, cp = number(row, "dp"), number(row, "cp")
    if any(degree is not None and degree < 1 for degree in (dp, cp)):
        raise Unusable("tp x pp x cp x dp is not gpus")
    if cp is None:
        # Context parallelism is for long sequences; who does not mention it has none.
        cp = 1.0 if dp is None else gpus / (tp * pp * dp)
    dp = gpus / (tp * pp * cp) if dp is None else dp
    if tp * pp * cp * dp != gpus or cp != int(cp) or dp != int(dp):
        raise Unusable("tp x pp x cp x dp is not gpus")
    return tp, pp, int(cp), int(dp)


def _batch(row: Mapping[str, str], model: ModelSpec) -> int:
    """Sequences of a step, computed from its tokens if they are not published."""
    if not row.get("gbs"):
        seconds, rate = number(row, "step_time_s"), number(row, "tokens_per_s_per_gpu")
        if seconds and rate and seconds > 0 and rate > 0:
            return max(round(seconds * rate * count(row, "gpus") / model.seq), 1)
    return count(row, "gbs")


def _recompute(row: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Kind of recomputation, and its modules where the row or its notes name them."""
    text = row.get("recompute", "").lower()
    listed = [MODULES.get(part) for part in text.split("+")]
    if len(listed) > 1 and all(listed):
        return "selective", tuple(module for module in listed if module)
    word = re.split(r"[^a-z]", text)[0]
    if word not in ("none", "selective", "full"):
        raise Unusable("recompute not published" if not text else "recompute of a kind not modelled")
    said = note_value(row, "recompute_modules") or note_value(row, "modules") or note_value(row, "recompute")
    named = _modules(said) if said else _listed_modules(row)
    return word, named if word == "selective" else ()


def _block(row: Mapping[str, str], layers: int) -> dict[str, Any]:
    """Fields of recomputation that stops after the first layers of a stage, printed as `full/block/2`.

    Args:
        layers: layers of the largest stage; recomputation of as many is not limited.
    """
    said = re.fullmatch(r"full/block/(\d{1,4})", row.get("recompute", "").lower())
    if said is None or int(said[1]) >= layers:
        return {}
    if int(said[1]) == 0:
        raise Unusable("recompute of a kind not modelled")
    return {"recompute_method": "block", "recompute_num_layers": int(said[1])}


def _modules(text: str) -> tuple[str, ...]:
    named = {MODULES.get(part.strip()) for part in text.split("+")}
    return tuple(sorted(module for module in named if module))


def _listed_modules(row: Mapping[str, str]) -> tuple[str, ...]:
    """Modules of the part of the notes that lists only modules, such as `moe_act+layernorm`."""
    for part in row.get("notes", "").split(";"):
        names = [name.strip() for name in part.split("+")]
        if len(names) > 1 and all(name in MODULES for name in names):
            return _modules(part)
    return ()


def _expert_tensor_parallel(row: Mapping[str, str], model: ModelSpec, tp: int, stage: int) -> int:
    """Number of ranks that share an expert.

    The notes of folded layouts print it. Otherwise it is Megatron-Core's default, the tensor-parallel group,
    if that is possible on the `stage` devices of a pipeline stage. Recipes of Megatron-Bridge do not split
    narrow experts.
    """
    if not model.experts:
        return 1
    notes = row.get("notes", "")
    printed = re.search(r"\b(?:ETP|etp)=(\d{1,9})", notes)
    if printed:
        return int(printed[1])
    told = re.search(r"\bETP=[^;]*=TP for non-folding", notes)
    if told and "folding" in (note_value(row, "method") or "").lower():
        # Experts that are folded apart are folded to stay whole.
        return 1
    whole = (not told and "FSDP" in row.get("zero_stage", "")) or stage % (count(row, "ep") * tp) > 0
    return 1 if whole or model.expert_ffn < model.hidden else tp


def _schedule(row: Mapping[str, str], vpp: int) -> str:
    named = (note_value(row, "schedule") or "").lower()
    if named and named not in SCHEDULES:
        raise Unusable(f"schedule {named} not modelled")
    if SCHEDULES.get(named) in ("zbv", "dualpipev"):
        return SCHEDULES[named]
    return "interleaved" if vpp > 1 else "1f1b"


def _precision(row: Mapping[str, str]) -> str:
    text = row.get("precision", "").lower()
    if not text:
        raise Unusable("precision not published")
    found = re.match(r"(?:amp[_-])?([a-z]+\d+)(?![a-z\d])", text)
    if found is None or found[1] not in PRECISIONS:
        raise Unusable(f"precision {text} not modelled")
    return PRECISIONS[found[1]]


def _zero(row: Mapping[str, str], ranks: int) -> tuple[int, int]:
    """ZeRO's stage, and the number of copies of its shards, among `ranks` data- and context-parallel
    ranks."""
    text = row.get("zero_stage", "").lower()
    if not text:
        raise Unusable("zero_stage not published")
    sharded = re.search(r"fsdp=(\d{1,9})", text)
    stage = _zero_number(text)
    if ranks == 1:
        return 0, 1
    shards = int(sharded[1]) if sharded else ranks
    if not shards or ranks % shards:
        raise Unusable("ZeRO's shards do not divide the data-parallel ranks")
    return min(stage, 3), ranks // shards if stage else 1


def _zero_number(text: str) -> int:
    """The ZeRO stage in a cell: `1(dist-opt)`, `fsdp_full(3)`, `fsdp(fsdp=64)`."""
    text = text.lower()
    digit = re.search(r"\d", re.sub(r"fsdp\d*(=\d+)?", "", text))
    return int(digit[0]) if digit else 3 if "fsdp" in text else 0
