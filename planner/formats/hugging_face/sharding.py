"""Sharding of a job of Hugging Face's trainer: by DeepSpeed, by FSDP, or none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.formats.hugging_face import deepspeed_config
from planner.formats.hugging_face.job import Job
from planner.formats.hugging_face.names import ACCELERATE_KEYS, DEEPSPEED_KEYS, SHARDING


def sharding_of(job: Job, degrees: Mapping[str, Any]) -> dict[str, Any]:
    """ZeRO stage, copies and offload, from DeepSpeed or FSDP; without either, plain data parallelism."""
    if job.deepspeed.entries:
        found: dict[str, Any] = {"zero_stage": deepspeed_config.zero_stage(job.deepspeed)}
        shards = job.deepspeed.count(DEEPSPEED_KEYS["zero_replicas"])
        ranks = degrees["data_parallel"] * degrees["context_parallel"]
        if shards and found["zero_stage"] == 3 and ranks % shards == 0 and shards < ranks:
            found["zero_replicas"] = ranks // shards
        if deepspeed_config.offloads_optimizer(job.deepspeed):
            found["offload_optimizer"] = True
        return found
    if job.distributed == "deepspeed":
        return _accelerates_deepspeed(job)
    named = job.command.first("--deepspeed_config", "--deepspeed")
    own = re.fullmatch(r"zero([0-3])(_offload)?", "" if named is None else named.text)
    if own is not None and job.software == "ms-swift":
        # Files of its own (swift/config/zero*.json).
        return {"zero_stage": int(own.group(1))} | ({"offload_optimizer": True} if own.group(2) else {})
    if named is not None:
        text = f"{named.text} says the stage of ZeRO, and is not given"
        job.command.add("unknown", text, named.path, "give that file beside this one")
        return {"zero_stage": 0}
    if not job.is_under_fsdp:
        return {"zero_stage": 0}
    return _fsdp(job)


def _accelerates_deepspeed(job: Job) -> dict[str, Any]:
    """ZeRO from accelerate's own keys, or from the DeepSpeed file that they name."""
    keys, at = job.accelerate, "deepspeed_config"
    named = keys.first(f"{at}.deepspeed_config_file")
    if named is not None:
        text = f"{named.text} says the stage of ZeRO, and is not given"
        keys.add("unknown", text, named.path, "give that file beside this one")
        return {"zero_stage": 0}
    found: dict[str, Any] = {"zero_stage": min(keys.count(f"{at}.zero_stage", least=0) or 0, 3)}
    if (keys.text(f"{at}.offload_optimizer_device") or "none") != "none":
        found["offload_optimizer"] = True
    return found


def _fsdp(job: Job) -> dict[str, Any]:
    words = (job.command.text("--fsdp") or "").lower().replace(",", " ").split()
    named_file = job.command.first("--fsdp_config")
    given = job.accelerate.under("fsdp_config")
    if named_file is not None and not given and named_file.text.endswith((".json", ".yaml", ".yml")):
        text = f"{named_file.text} says how weights are sharded, and is not given"
        job.command.add("unknown", text, named_file.path, "give that file beside this one")
    keys = job.accelerate
    named = keys.text(ACCELERATE_KEYS["zero_stage"]) or next(
        (word for word in words if word in SHARDING), None
    )
    strategy = (named or "full_shard").lower()
    if re.fullmatch(r"[1-5]", strategy):
        strategy = tuple(SHARDING)[int(strategy) - 1]
    if strategy not in SHARDING:
        keys.add("illegal", f"{named!r} is not one of {', '.join(SHARDING)}", ACCELERATE_KEYS["zero_stage"])
        return {"zero_stage": 3}
    stage = SHARDING[strategy]
    after = "fsdp_config.fsdp_reshard_after_forward"
    if named is None and (keys.text(after) or "true").lower() in ("false", "no"):
        stage = 2
    found: dict[str, Any] = {"zero_stage": stage}
    replicas = keys.count(ACCELERATE_KEYS["zero_replicas"]) or 1
    nodes = keys.count("num_machines") or 1
    if replicas > 1 or (strategy.startswith("hybrid") and nodes > 1):
        found["zero_replicas"] = replicas if replicas > 1 else nodes
    if keys.switch(ACCELERATE_KEYS["offload_optimizer"]) or "offload" in words:
        found["offload_optimizer"] = True
    return found
