"""The layout from flags of Megatron-LM and MindSpeed, with the software's defaults."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from costmodels.errors import on_one_line
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.facts.flag_catalogue import GivenFlag
from planner.formats.facts.keyed import Keyed
from planner.formats.facts.launcher import Launch
from planner.formats.facts.reading import Problems
from planner.formats.hugging_face import deepspeed_config
from planner.formats.megatron.job import Job
from planner.formats.megatron.memory import memory_degrees
from planner.formats.megatron.model import Given
from planner.formats.megatron.names import (
    COMMUNICATION_TYPES,
    CONTEXT_ALGORITHMS,
    DEGREE_FLAGS,
    SHARDING,
)
from planner.formats.megatron.rules import check_rules
from planner.formats.megatron.stages import layers_of_stages


def layout_of(job: Job, world: int | None, launch: Launch) -> Layout | None:
    """The layout that the framework derives from the flags, with its defaults."""
    model, problems = job.model, job.problems
    assert model is not None
    degrees: dict[str, Any] = {
        name: job.count(DEGREE_FLAGS[name]) or 1
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    }
    tp = degrees["tensor_parallel"]
    degrees["expert_tensor_parallel"] = _expert_tensor(job, degrees, model)
    degrees["sequence_parallel"] = job.is_given("--sequence-parallel") and tp > 1
    if degrees["context_parallel"] > 1:
        degrees["context_parallel_form"] = _context_form(job)
    degrees |= layers_of_stages(job.given, model, degrees["pipeline_parallel"], job.count, problems)
    degrees |= memory_degrees(job, model)
    mbs = job.count("--micro-batch-size")
    if mbs is None and not job.is_given("--micro-batch-size"):
        problems.add("illegal", "is missing: Megatron-LM has no default for it", "--micro-batch-size")
    degrees["micro_batch_size"] = mbs or 1
    gbs = job.batch()
    check_rules(job.given, model, degrees, world, gbs, job.framework, launch, problems)
    shards = tp * degrees["pipeline_parallel"] * degrees["context_parallel"]
    if world is None or problems.fatal or world % shards:
        return None
    degrees["data_parallel"] = world // shards
    degrees["global_batch_size"] = gbs or degrees["micro_batch_size"] * degrees["data_parallel"]
    degrees["zero_stage"] = _zero(job, degrees["data_parallel"] * degrees["context_parallel"])
    if degrees["zero_stage"] == 0:
        degrees.pop("zero_replicas", None)
    try:
        return Layout.model_validate(degrees)
    except ValidationError as error:
        message = on_one_line(error)
        flag = _blamed(job, message)
        where = (flag.name, flag.line) if flag else ("", None)
        problems.add("illegal", message, *where)
        return None


def _blamed(job: Job, message: str) -> GivenFlag | None:
    return blame_degree(message, job.given)


def _expert_tensor(job: Job, degrees: dict[str, Any], model: ModelSpec) -> int:
    if not model.experts:
        return 1
    if job.is_given("--moe-tp-extend-ep"):
        degrees["expert_parallel"] *= degrees["tensor_parallel"]
        return 1
    return job.count("--expert-tensor-parallel-size") or int(degrees["tensor_parallel"])


def _context_form(job: Job) -> str:
    flag = job.word("--context-parallel-algo")
    if job.framework == "megatron-deepspeed" and job.is_given("--ds-sequence-parallel-size"):
        return "all_to_all"
    if job.framework == "mindspeed":
        name = flag.text if flag else "ulysses_cp_algo"
        known = CONTEXT_ALGORITHMS
    else:
        flag = job.word("--cp-comm-type")
        name, known = (flag.values[0].text if flag else "p2p"), COMMUNICATION_TYPES
    if name not in known:
        text = f"{name} is priced as a ring: estimates know {', '.join(known)}"
        job.problems.add("note", text, flag.name if flag else "", flag.line if flag else None)
    return known.get(name, "ring")


def _zero(job: Job, replicas: int) -> int:
    if replicas == 1:
        return 0
    if job.framework == "megatron-deepspeed":
        return _deepspeeds_zero(job)
    # Without Megatron-FSDP nothing looks at the strategy.
    strategy = job.word("--data-parallel-sharding-strategy")
    if strategy is not None and job.is_given("--use-megatron-fsdp", "--use-custom-fsdp"):
        return SHARDING.get(strategy.text, 0)
    if job.is_given("--use-torch-fsdp2"):
        return 2 if job.is_given("--torch-fsdp2-no-reshard-after-forward") else 3
    optimizer = job.word("--optimizer")
    # Megatron-LM's former name for Muon with whole matrices shared out over data-parallel ranks.
    shares_out = optimizer is not None and optimizer.text == "dist_muon"
    return int(job.is_given("--use-distributed-optimizer") or shares_out)


def _deepspeeds_zero(job: Job) -> int:
    """The ZeRO stage from DeepSpeed's file, or from `--zero-stage`, which scripts write into that file."""
    if job.deepspeed is not None:
        keys = Keyed(job.deepspeed.entries, "deepspeed", job.deepspeed.file, Problems(job.deepspeed.file))
        return _least_stage(job, deepspeed_config.zero_stage(keys))
    flag = job.word("--zero-stage")
    if flag is not None and flag.text in ("0", "1", "2", "3"):
        return _least_stage(job, int(flag.text))
    config = job.given.get("--deepspeed_config") or job.given.get("--deepspeed-config")
    text = "says the stage of ZeRO, and is not given"
    name, line = (config.name, config.line) if config else ("--deepspeed_config", None)
    job.problems.add("unknown", text, name, line, "give that file beside this one")
    return 0


def _least_stage(job: Job, stage: int) -> int:
    """The effective ZeRO stage:

    DeepSpeed always splits the optimizer state of a bf16 pipeline. Sources: deepspeed/runtime/engine.py
    (`_do_optimizer_sanity_check`) and bf16_optimizer.py. Without `--no-pipeline-parallel` even a model of one
    stage is a pipeline.
    """
    whole = job.is_given("--no-pipeline-parallel", "--no_pipeline_parallel")
    if stage or job.precision() != "bf16" or whole:
        return stage
    text = "0 with bf16: DeepSpeed's BF16_Optimizer splits its state as stage 1 does, and is priced so"
    flag = job.given.get("--zero-stage")
    job.problems.add("note", text, "--zero-stage", flag.line if flag else None)
    return 1


def blame_degree(message: str, given: Given) -> GivenFlag | None:
    """The given flag whose degree a message names first."""
    places = [
        (message.index(name), -len(name), flag)
        for name, flag in DEGREE_FLAGS.items()
        if name in message and flag in given
    ]
    return given[min(places)[2]] if places else None
