"""Layers of each pipeline stage, from flags of Megatron-LM and MindSpeed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from costmodels.spec.layout import even_split
from costmodels.spec.model import ModelSpec
from planner.formats.facts.reading import Problems
from planner.formats.megatron.mindspeed_layers import noop_layers
from planner.formats.megatron.model import Given

Counted = Callable[[str], int | None]
"""A function that returns the whole number of a flag."""

MOST_STAGES = 100_000


def layers_of_stages(
    given: Given, model: ModelSpec, pipeline: int, count: Counted, problems: Problems
) -> dict[str, Any]:
    """Fields of `Layout`: chunks, schedule and layers of each stage.

    Megatron-LM splits evenly by default (transformer_config.py, `num_layers_in_first_pipeline_stage` and
    `pipeline_model_parallel_layout`).
    """
    idle = noop_layers(given)
    layers = model.layers + len(idle)
    found = _stages(given, layers, pipeline, count, problems)
    if not idle or sum(found["layers_per_stage"]) != layers:
        return found
    first, kept = 0, []
    for size in found["layers_per_stage"]:
        kept.append(size - sum(first <= layer < first + size for layer in idle))
        first += size
    if min(kept) < 1:
        flag = given["--noop-layers"]
        problems.add("unknown", "leaves a stage without a layer, which is not priced", flag.name, flag.line)
        return found
    return found | {"layers_per_stage": tuple(kept)}


def _stages(given: Given, layers: int, pipeline: int, count: Counted, problems: Problems) -> dict[str, Any]:
    listed = _layout(given, problems)
    if listed is not None:
        if sum(listed) != layers or len(listed) % pipeline:
            name = "--pipeline-model-parallel-layout"
            text = (
                f"has {len(listed)} stages of {sum(listed)} layers together; expected {layers} layers and a "
                f"multiple of {pipeline} stages"
            )
            problems.add("illegal", text, name, given[name].line)
        return _with_schedule(given, listed, max(len(listed) // pipeline, 1))
    chunks = _chunks(given, layers, pipeline, count, problems)
    stages = pipeline * chunks
    ends = sum(name in given for name in _COUNTED)
    if stages > layers + ends:
        flag = given.get("--pipeline-model-parallel-size")
        where = ("--pipeline-model-parallel-size", flag.line if flag else None)
        text = f"{stages} stages are more than the {layers} layers"
        if "--pp-partition-method" in given and stages <= layers + 2:
            # Stages of the embedding and of the head alone (deepspeed/runtime/pipe/module.py).
            problems.add("unknown", f"{text}: stages without a layer are not priced", *where)
        else:
            problems.add("illegal", text, *where)
        return _with_schedule(given, (1,) * layers, 1)
    listed = _named_list(given, problems) or _with_ends(given, layers, stages, count, problems)
    if listed is None and "--deepspeed" in given:
        listed = _deepspeeds(given, layers, stages)
    if listed is None:
        if layers % stages:
            text = f"{layers} layers do not split evenly over {stages} pipeline stages"
            flag = given.get("--pipeline-model-parallel-size")
            near = [size for size in range(stages, 0, -1) if layers % size == 0]
            remedy = f"use {near[0]} stages, or --pipeline-model-parallel-layout"
            where = ("--pipeline-model-parallel-size", flag.line if flag else None)
            problems.add("illegal", text, *where, remedy)
        listed = (layers // stages,) * stages
    elif min(listed) == 0 and sum(listed) == layers and ends:
        name = next(name for name in _COUNTED if name in given)
        text = "leaves a stage without a layer, which is not priced"
        problems.add("unknown", text, name, given[name].line)
    elif sum(listed) != layers or min(listed) < 1:
        some = ",".join(map(str, listed[:20]))
        text = f"layers of the stages are {some}, {sum(listed)} together, not {layers}"
        problems.add("illegal", text, "--num-layers", given["--num-layers"].line)
    return _with_schedule(given, listed, chunks)


def _with_schedule(given: Given, listed: tuple[int, ...], chunks: int) -> dict[str, Any]:
    named = given.get("--schedules-method")
    schedule = "interleaved" if chunks > 1 else "1f1b"
    if named is not None and named.text == "dualpipev":
        schedule = "dualpipev"
    return {"virtual_pipeline_parallel": chunks, "schedule": schedule, "layers_per_stage": listed}


def _chunks(given: Given, layers: int, pipeline: int, count: Counted, problems: Problems) -> int:
    dual = given.get("--schedules-method")
    if dual is not None and dual.text == "dualpipev":
        return 2
    chunks = count("--num-virtual-stages-per-pipeline-rank")
    if chunks is not None:
        return chunks
    name = "--num-layers-per-virtual-pipeline-stage"
    each = count(name)
    if each is None:
        return 1
    if layers % (pipeline * each):
        text = f"{each} x {pipeline} pipeline ranks does not divide the {layers} layers"
        possible = [size for size in range(1, layers // pipeline + 1) if layers % (pipeline * size) == 0]
        remedy = f"use {', '.join(map(str, possible[:8]))}" if possible else ""
        problems.add("illegal", text, name, given[name].line, remedy)
        return 1
    return layers // (pipeline * each)


def _named_list(given: Given, problems: Problems) -> tuple[int, ...] | None:
    """Layers from MindSpeed's `--num-layer-list 8,8,7,7`."""
    flag = given.get("--num-layer-list")
    if flag is None:
        return None
    parts = flag.text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,5}", part) for part in parts):
        problems.add("illegal", f"{flag.text}: expected numbers with commas between", flag.name, flag.line)
        return None
    return tuple(map(int, parts))


def _deepspeeds(given: Given, layers: int, stages: int) -> tuple[int, ...]:
    """The most even stages; with some methods embedding and head count as layers.

    Source: DeepSpeed's PipelineModule, `partition_method`: `type:transformer`, or
    `type:transformer|embedding`.
    """
    method = given.get("--pp-partition-method")
    if method is None or "embedding" not in method.text or layers + 2 < 3 * stages:
        return even_split(layers, stages)
    first, *between, last = even_split(layers + 2, stages) if stages > 1 else (layers + 2, 0)
    return (first - 1, *between, last - 1) if stages > 1 else (layers,)


def _with_ends(
    given: Given, layers: int, stages: int, count: Counted, problems: Problems
) -> tuple[int, ...] | None:
    """Layers with given first and last stages, and equal stages between them."""
    first, last = count("--decoder-first-pipeline-num-layers"), count("--decoder-last-pipeline-num-layers")
    embedding = "--account-for-embedding-in-pipeline-split" in given
    loss = "--account-for-loss-in-pipeline-split" in given
    if embedding or loss:
        each = (layers + embedding + loss) // stages
        first, last = (each - 1 if embedding else None), (each - 1 if loss else None)
    ends = [size for size in (first, last) if size is not None]
    middle = stages - len(ends)
    if not ends:
        return None
    if stages < 2 or middle < 0 or (middle and (layers - sum(ends)) % middle) or layers < sum(ends):
        text = (
            f"{layers} layers do not split over {stages} stages with {', '.join(map(str, ends))} at the ends"
        )
        flag = next(given[name] for name in _ENDS if name in given)
        problems.add("illegal", text, flag.name, flag.line)
        return None
    between = [(layers - sum(ends)) // middle] * middle if middle else []
    return (*([first] if first is not None else []), *between, *([last] if last is not None else []))


_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
"""Switches that make embedding and loss count as a layer."""

_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", *_COUNTED)


def _layout(given: Given, problems: Problems) -> tuple[int, ...] | None:
    """Layers of the stages of `--pipeline-model-parallel-layout`, such as `Et*3|(tt|)*6tL`.

    Letters (megatron/core/transformer/pipeline_parallel_layer_layout.py): E embedding, t layer, m MTP module,
    L loss; `*N` repeats the preceding letter or group, brackets group.
    """
    flag = given.get("--pipeline-model-parallel-layout")
    if flag is None:
        return None
    text = flag.text.replace(",", "").replace(" ", "").strip("\"'")
    text = _unfolded(text)
    if not re.fullmatch(r"[EtmL|]+", text):
        problems.add(
            "illegal",
            f"{flag.text[:80]} is not a layout of stages such as Et*3|(tt|)*6tL",
            flag.name,
            flag.line,
        )
        return None
    found = tuple(stage.count("t") for stage in text.split("|"))
    if min(found) < 1:
        empty = "has a stage without a layer, which is not priced"
        problems.add("unknown", empty, flag.name, flag.line)
        return None
    return found


def _unfolded(text: str) -> str:
    """The text with all repeats written out, or unchanged where that exceeds `MOST_STAGES` letters."""
    for repeat in (r"([EtmL|])\*([0-9]{1,4})", r"\(([^()]*)\)\*([0-9]{1,4})"):
        while found := re.findall(repeat, text):
            if sum(len(part) * int(times) for part, times in found) > MOST_STAGES:
                return text
            text = re.sub(repeat, lambda match: match[1] * int(match[2]), text)
    return text
