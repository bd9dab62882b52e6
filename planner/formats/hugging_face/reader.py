"""Jobs of Hugging Face's trainer: a command, accelerate's YAML and DeepSpeed's JSON, in any combination.

What they leave open has the default of transformers' TrainingArguments (training_args.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from costmodels.dataclass import dataclass
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.hub_models import model_of
from planner.formats.facts.keyed import Keyed, known_keys
from planner.formats.facts.launcher import Launch, commands, count_of, flag_values
from planner.formats.facts.launcher import world_size as launched
from planner.formats.facts.layout_fields import Places, build_layout, degrees_of_world
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.hugging_face import deepspeed_config
from planner.formats.hugging_face.accelerate_flags import accelerate_entries
from planner.formats.hugging_face.accelerate_names import STRATEGIES
from planner.formats.hugging_face.adapters import with_adapters
from planner.formats.hugging_face.names import (
    ACCELERATE_KEYS,
    DEEPSPEED_KEYS,
    FLAGS,
    MICRO,
    OPTIMIZERS,
    SHARDING,
    STEPS,
)
from planner.formats.hugging_face.trainer_files import as_flags
from planner.inputs.model import with_seq

TRAINING_COMMANDS = ("sft", "pt", "rlhf", "train")
"""Commands of ms-swift, LLaMA-Factory and TRL that train, whatever their flags."""

FEWEST_FLAGS = 3
"""Flags of TrainingArguments of a command that trains."""

MODEL_NAMES = ("--model_name_or_path", "--model_name", "--config_name", "--tokenizer_name")
"""Flags that name a model, or what has its shape."""

SEQUENCE = (
    *(
        "--max_seq_length",
        "--max_seq_len",
        "--model_max_length",
        "--block_size",
        "--cutoff_len",
        "--max_length",
    ),
    *("--sequence_length", "--seq_length"),
)


def trainer_reader(software: str) -> Callable[[Source, Surroundings], Reading]:
    """What reads the YAML of a trainer alone."""
    return lambda source, around: read_hugging_face(None, None, None, around, source, software)


def is_accelerate(entries: Entries) -> bool:
    """Whether keys are those of accelerate's YAML, or of its part about FSDP in a file of its own."""
    return (
        "distributed_type" in entries or "fsdp_config.fsdp_sharding_strategy" in entries or is_fsdp(entries)
    )


FSDP_KEYS = {
    *("transformer_layer_cls_to_wrap", "min_num_params", "backward_prefetch", "forward_prefetch"),
    *("limit_all_gathers", "use_orig_params", "sync_module_states", "cpu_ram_efficient_loading"),
    *("activation_checkpointing", "reshard_after_forward", "version", "state_dict_type", "offload_params"),
    *("auto_wrap_policy", "sharding_strategy", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"),
}
"""Keys of a file that `--fsdp_config` names (transformers/training_args.py), `fsdp_` before them or not."""


def is_fsdp(entries: Entries) -> bool:
    """Whether keys are those of a file that `--fsdp_config` names."""
    return bool(entries) and {path.partition(".")[0].removeprefix("fsdp_") for path in entries} <= FSDP_KEYS


def _under_fsdp(entries: Entries) -> Entries:
    """Keys of such a file as those of accelerate's YAML."""
    found = {path: f"fsdp_config.fsdp_{path.removeprefix('fsdp_')}" for path in entries}
    return {
        name: Entry(name, entries[path].text, entries[path].line, entries[path].items, entries[path].quoted)
        for path, name in found.items()
    }


def find_command(
    source: str,
    define: Mapping[str, str],
    beside: Mapping[str, str] | None = None,
    files: Sequence[str] = (),
) -> tuple[Launch, Entries] | None:
    """The command that trains with Hugging Face's trainer, and its flags; None where there is none.

    Args:
        files: configurations of a trainer; a command that names one of them is one, whatever its flags.
    """
    names = {file.rpartition("/")[2] for file in files}
    known = known_keys("transformers")
    best: tuple[int, Launch, Entries] | None = None
    for launch in commands(source, dict(define), beside):
        entries = _flag_entries(launch)
        count = sum(path in known for path in entries)
        if names & {word.text.rpartition("/")[2] for word in launch.arguments} or (
            _software(launch) != "transformers" and launch.program in TRAINING_COMMANDS
        ):
            count += FEWEST_FLAGS
        if count >= FEWEST_FLAGS and (best is None or count > best[0]):
            best = count, launch, entries
    return None if best is None else best[1:]


def _flag_entries(launch: Launch) -> Entries:
    """Flags with their values, those with hyphens under their usual name with underscores."""
    return {
        f"--{name}": Entry(f"--{name}", " ".join(values) if values else "true", line)
        for name, values, line in flag_values(launch.arguments)
    }


@dataclass
class _Job:
    """A job's files, each as keys; empty where there is none."""

    command: Keyed
    accelerate: Keyed
    deepspeed: Keyed
    launch: Launch | None
    software: str = "transformers"
    """The software whose script or configuration it is, where that is known."""
    alone: bool = False
    """No command and no configuration of a trainer is given, whose defaults would count."""

    @property
    def all(self) -> tuple[Keyed, ...]:
        return self.command, self.accelerate, self.deepspeed


def read_hugging_face(
    command: Source | None,
    accelerate: Source | None,
    deepspeed: Source | None,
    around: Surroundings,
    trainer: Source | None = None,
    software: str = "",
) -> Reading:
    """The job that these files describe together; at least one of them is given.

    Args:
        trainer: the YAML of a trainer that is built on Hugging Face's; `software` says of which.
    """
    main = trainer or accelerate or deepspeed or command
    assert main is not None
    problems = Problems(main.file)
    names_of_files = () if trainer is None else (trainer.file,)
    found = (
        None if command is None else find_command(command.text, around.define, around.beside, names_of_files)
    )
    launch, flags = found if found is not None else (None, {})
    of_trainer, of_accelerate = ({}, {}) if trainer is None else as_flags(trainer.entries, software)
    flags = of_trainer | {name: entry for name, entry in flags.items() if name != "--config"}
    if deepspeed is None and launch is not None and "--deepspeed" in flags:
        deepspeed = deepspeed_config.written_by(launch, flags["--deepspeed"].text, main.file)

    def keyed(framework: str, source: Source | None, entries: Entries, has: bool) -> Keyed:
        file = main.file if source is None else source.file
        known = known_keys(framework) if has else ()
        return Keyed(with_definitions(entries, around.define, known), framework, file, problems)

    launched_with = accelerate_entries(launch)
    named = launched_with.pop("config_file", None)
    of_file = (accelerate.entries if accelerate else {}) | of_accelerate
    fsdp_alone = accelerate is not None and is_fsdp(accelerate.entries)
    if fsdp_alone and accelerate is not None:
        of_file = _under_fsdp(accelerate.entries) | of_accelerate
    job = _Job(
        keyed("transformers", trainer or command, flags, True),
        keyed(
            "accelerate",
            accelerate or trainer or command,
            of_file | launched_with,
            bool(of_file or launched_with),
        ),
        keyed("deepspeed", deepspeed, deepspeed.entries if deepspeed else {}, deepspeed is not None),
        launch,
        software or _software(launch),
        command is None and trainer is None,
    )
    if named is not None and accelerate is None:
        text = f"{named.text} says how the job is split, and is not given"
        problems.add(
            "unknown",
            text,
            "--config_file",
            named.line,
            "give that file too",
            command.file if command else "",
        )
    config = None if trainer is not None or found is None else found[1].get("--config")
    if config is not None and config.text.endswith((".yaml", ".yml", ".json")):
        text = f"{config.text} says the arguments of the trainer, and is not given"
        job.command.add("unknown", text, "--config", "give that file too")
    assumed: list[str] = []
    sharded = _is_fsdp(job)
    zero = deepspeed is not None or _uses_deepspeed(job)
    splits = accelerate is not None and not fsdp_alone
    framework = "accelerate" if splits and not deepspeed else "deepspeed" if zero else "transformers"
    framework = software or (job.software if job.software != "transformers" else framework)
    names = {**FLAGS}
    names |= ACCELERATE_KEYS if accelerate else {}
    names |= DEEPSPEED_KEYS if deepspeed else {}
    given = tuple(dataclasses.replace(flag) for keys in job.all for flag in keys.flags() if flag.line)
    places = Places(names, {flag.name: flag.line for flag in given})
    if around.model is not None:
        for name in (*MODEL_NAMES, "--model"):
            flags.pop(name, None)
            job.command.entries.pop(name, None)
    model = _model(job, around, assumed)
    if job.alone:
        assumed.append("the training script, which is not given, learns the next token of one model")
    world = around.world_size or _world(job)
    if world is None:
        text = "the number of devices is not known: the launcher says it"
        problems.add("unknown", text, "num_processes" if accelerate else "", None, "give --world-size")
    _check_agreement(job)
    layout = None
    precision = _precision(job)
    if model is not None and world is not None:
        layout = _layout(job, model, world, places, assumed)
    for keys in job.all:
        keys.name_unread()
        others = [flag for flag in keys.flags() if flag.line]
        name_others(
            others, problems, "is no key or flag of Hugging Face's trainer that is known here", keys.file
        )
    engine = "deepspeed" if zero else "fsdp"
    split = layout is not None and (layout.tensor_parallel > 1 or layout.context_parallel > 1)
    return Reading(
        framework=framework,
        engine="torchtitan" if split and engine == "fsdp" and sharded else engine,
        file=main.file,
        model=model,
        layout=layout,
        program="" if launch is None else launch.program,
        precision=precision,
        world_size=world,
        local_world_size=around.local_world_size or _per_node(job),
        global_batch_size=None if layout is None else layout.global_batch_size,
        flags=given,
        files={flag.name: keys.file for keys in job.all for flag in keys.flags() if flag.line},
        names=names,
        training=_training(job),
        assumed=tuple(assumed),
        problems=tuple(problems.found),
        memory_is_bound=(job.command.text("--gradient_checkpointing") or "").lower() in _OFFLOADED_INPUTS,
    )


def _software(launch: Launch | None) -> str:
    """The software whose command it is, by the name of its program."""
    words = [] if launch is None else [*(word.text for word in launch.launcher), launch.program]
    names = {word.rpartition("/")[2] for word in words}
    if "swift" in names or any("swift/cli/" in word for word in words):
        return "ms-swift"
    if names & {"llamafactory-cli", "llamafactory"}:
        return "llama-factory"
    return "trl" if "trl" in names else "transformers"


def _distributed(job: _Job) -> str:
    return (job.accelerate.text("distributed_type") or "").lower()


def _uses_deepspeed(job: _Job) -> bool:
    return _distributed(job) == "deepspeed" or "--deepspeed" in job.command


def _is_fsdp(job: _Job) -> bool:
    return _distributed(job) == "fsdp" or "--fsdp" in job.command or job.accelerate.under("fsdp_config")


def _world(job: _Job) -> int | None:
    if job.launch is not None:
        devices = launched(job.launch)
        if devices is not None:
            return devices
    return job.accelerate.count("num_processes")


def _per_node(job: _Job) -> int | None:
    if job.launch is not None and count_of(job.launch.per_node):
        return count_of(job.launch.per_node)
    total, machines = job.accelerate.count("num_processes"), job.accelerate.count("num_machines")
    return total // machines if total and machines and total % machines == 0 else None


def _model(job: _Job, around: Surroundings, assumed: list[str]) -> ModelSpec | None:
    seq = job.command.count(*SEQUENCE)
    # ms-swift's model_name is how the model calls itself.
    names = ("--model",) if job.software == "ms-swift" else (*MODEL_NAMES, "--model")
    name = job.command.text(*names)
    model = around.model
    if model is None and name is not None:
        model = model_of(name)
        if model is not None:
            assumed.append(f"the model is {model.name} of the catalogue ({name})")
    if model is None:
        said = f"the model {name} is not in the catalogue" if name else "no file or flag names the model"
        job.command.problems.add(
            "unknown", said, "--model_name_or_path" if name else "", None, "give its config.json beside it"
        )
        return None
    # A model of the catalogue or of a file of its own has the length that it trains on; config.json has the
    # most positions.
    has_length = around.model is not None and not (around.described or "").endswith(".json")
    if seq is None and not (job.alone and has_length):
        text = "no flag says the length of sequences, for which the trainer has no default"
        job.command.add("unknown", text, SEQUENCE[0], "give --define max_seq_length=N")
    elif seq is None:
        assumed.append(f"sequences of {model.seq} tokens, as {model.name} has (or --define max_seq_length=N)")
    return with_adapters(with_seq(model, seq), job.command, job.software)


def _check_agreement(job: _Job) -> None:
    """DeepSpeed's file must say what the flags say, or `auto` (transformers/integrations/deepspeed.py)."""
    for path, flag in (
        ("train_micro_batch_size_per_gpu", MICRO),
        ("gradient_accumulation_steps", STEPS),
        ("gradient_clipping", "--max_grad_norm"),
        ("optimizer.params.lr", "--learning_rate"),
    ):
        if path not in job.deepspeed or flag not in job.command or job.deepspeed.text(path) == "auto":
            continue
        ours, theirs = job.deepspeed.number(path), job.command.number(flag)
        if ours is not None and theirs is not None and ours != theirs:
            text = f"{job.deepspeed.text(path)} is not what {flag} {job.command.text(flag)} says"
            job.deepspeed.add("illegal", text, path, "write auto")


def _layout(job: _Job, model: ModelSpec, world: int, places: Places, assumed: list[str]) -> Layout | None:
    degrees: dict[str, Any] = {
        "tensor_parallel": job.deepspeed.count(DEEPSPEED_KEYS["tensor_parallel"])
        or job.accelerate.count(ACCELERATE_KEYS["tensor_parallel"])
        or 1,
        "context_parallel": _context(job),
    }
    if degrees["context_parallel"] > 1:
        heads = "parallelism_config.parallelism_config_sp_size" in job.accelerate
        ulysses = heads or DEEPSPEED_KEYS["context_parallel"] in job.deepspeed
        strategy = job.accelerate.choice(ACCELERATE_KEYS["context_parallel_form"], STRATEGIES, "allgather")
        degrees["context_parallel_form"] = "all_to_all" if ulysses else STRATEGIES[strategy]
    if _distributed(job) == "megatron_lm":
        text = "MEGATRON_LM is not read here; give the flags of Megatron-LM in a script"
        job.accelerate.add("unknown", text, "distributed_type")
        return None
    whole = degrees_of_world(degrees, world, places, job.command.problems)
    if whole is None:
        return None
    ranks = whole["data_parallel"]
    whole |= {"layers_per_stage": (model.layers,), "precision": _precision(job)}
    whole |= _sharding(job, whole)
    whole |= _batch(job, ranks, assumed)
    if _recomputes(job):
        whole["recompute"] = "full"
    optimizer = (job.command.text("--optim") or "").lower().replace("paged_", "")
    whole["optimizer"] = OPTIMIZERS.get(optimizer, "adam")
    if any(problem.severity == "illegal" for problem in job.command.problems.found):
        return None
    return build_layout(whole, places, job.command.problems)


def _context(job: _Job) -> int:
    at = "parallelism_config.parallelism_config"
    ulysses = job.deepspeed.count(DEEPSPEED_KEYS["context_parallel"]) or job.accelerate.count(f"{at}_sp_size")
    return job.accelerate.count(f"{at}_cp_size") or ulysses or 1


def _recomputes(job: _Job) -> bool:
    flags = ("--gradient_checkpointing", "--gradient_checkpointing_enable", "--activation_checkpointing")
    said = job.command.first(*flags)
    if said is not None and said.text.lower() in _OFFLOADED_INPUTS:
        return True
    usual = job.software in _RECOMPUTE and not job.command.switch("--disable_gradient_checkpointing")
    return job.command.switch(*flags, default=usual) or job.accelerate.switch(ACCELERATE_KEYS["recompute"])


_RECOMPUTE = ("ms-swift", "llama-factory", "trl")
"""Trainers that recompute unless they are told not to.

swift/trainers/arguments.py, llamafactory/hparams/model_args.py, and trl/trainer/base_config.py of 2026.
"""

_OFFLOADED_INPUTS = ("offload", "offload_disk", "unsloth")
"""Words of axolotl for recomputation whose kept inputs wait in host memory (utils/schemas/config.py)."""


def _sharding(job: _Job, degrees: Mapping[str, Any]) -> dict[str, Any]:
    """Stage of ZeRO, copies and offload, of DeepSpeed or FSDP; without either, data parallelism alone."""
    if job.deepspeed.entries:
        found: dict[str, Any] = {"zero_stage": deepspeed_config.zero_stage(job.deepspeed)}
        shards = job.deepspeed.count(DEEPSPEED_KEYS["zero_replicas"])
        ranks = degrees["data_parallel"] * degrees["context_parallel"]
        if shards and found["zero_stage"] == 3 and ranks % shards == 0 and shards < ranks:
            found["zero_replicas"] = ranks // shards
        if deepspeed_config.offloads_optimizer(job.deepspeed):
            found["offload_optimizer"] = True
        return found
    if _distributed(job) == "deepspeed":
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
    if not _is_fsdp(job):
        return {"zero_stage": 0}
    return _fsdp(job)


def _accelerates_deepspeed(job: _Job) -> dict[str, Any]:
    """ZeRO as accelerate's own keys say it, or, where they name a file, as that says."""
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


def _fsdp(job: _Job) -> dict[str, Any]:
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


_MICRO_BATCHES = {"ms-swift": 1, "axolotl": 1}
"""Default micro batches that are not TrainingArguments'.

swift/trainers/arguments.py and axolotl/utils/schemas/training.py.
"""

SWIFT_BATCH = 16
"""Sequences of a step to which ms-swift fills up steps that nobody says."""


def _batch(job: _Job, ranks: int, assumed: list[str]) -> dict[str, Any]:
    """Micro batch and global batch; DeepSpeed fills in the one of three numbers that is missing."""
    keys = job.deepspeed
    micro = deepspeed_config.count(keys, "train_micro_batch_size_per_gpu") or job.command.count(MICRO)
    steps = deepspeed_config.count(keys, "gradient_accumulation_steps") or job.command.count(STEPS)
    steps = steps or job.accelerate.count("deepspeed_config.gradient_accumulation_steps")
    total = deepspeed_config.count(keys, "train_batch_size")
    if total is not None and micro is not None and steps is None and total % (micro * ranks) == 0:
        steps = total // (micro * ranks)
    if total is not None and micro is None and total % ((steps or 1) * ranks) == 0:
        micro = total // ((steps or 1) * ranks)
    if micro is None and job.alone:
        path = "train_micro_batch_size_per_gpu" if keys.entries else MICRO
        text = "the batch is the training script's, which is not given"
        keys.add("unknown", text, path, "give that script too, or --define per_device_train_batch_size=N")
        micro = 1
    if micro is None:
        micro = _MICRO_BATCHES.get(job.software, 8)
        whose = job.software if job.software in _MICRO_BATCHES else "TrainingArguments"
        assumed.append(f"{MICRO} {micro} (the default of {whose})")
    if steps is None and job.software == "ms-swift":
        steps = -(-SWIFT_BATCH // (micro * ranks))
        assumed.append(f"{STEPS} {steps} (ms-swift's default: {SWIFT_BATCH} sequences a step)")
    whole = micro * (steps or 1) * ranks
    if total is not None and total != whole:
        text = f"{total} is not micro batch {micro} x {steps or 1} steps x {ranks} ranks = {whole}"
        keys.add("illegal", text, "train_batch_size", f"use {whole}, or auto")
    return {"micro_batch_size": micro, "global_batch_size": whole}


def _precision(job: _Job) -> str:
    fixed = deepspeed_config.precision(job.deepspeed) if job.deepspeed.entries else None
    if fixed not in (None, "fp32"):
        return str(fixed)
    said = job.accelerate.text("mixed_precision") or any(
        f"--{name}" in job.command for name in ("bf16", "fp16")
    )
    if fixed is None and job.deepspeed.entries and job.alone and not said:
        path = "bf16.enabled" if "bf16.enabled" in job.deepspeed else "fp16.enabled"
        text = "auto: the number format is the trainer's, whose command is not given"
        job.deepspeed.add("unknown", text, path, "give that command too, or --define bf16=true")
    if job.software == "ms-swift" and not any(f"--{name}" in job.command for name in ("bf16", "fp16")):
        # The number format of the weights, which is that of config.json unless it is given.
        kind = (job.command.text("--torch_dtype") or "bfloat16").lower()
        return {"bfloat16": "bf16", "float16": "fp16"}.get(kind, "fp32")
    for name in ("bf16", "fp16"):
        if job.command.switch(f"--{name}") or job.command.text("--mixed_precision") == name:
            return name
    if job.software == "trl" and not said:
        return "bf16"  # Its own default (trl/trainer/base_config.py).
    if job.software == "open-instruct" and not said:
        text = "the number format is that of accelerate launch, which is not given"
        job.command.add("unknown", text, "--mixed_precision", "give --define mixed_precision=bf16")
    mixed = job.accelerate.text("mixed_precision")
    return mixed if mixed in ("bf16", "fp16", "fp8") else "fp32"


def _training(job: _Job) -> dict[str, str]:
    """What is learned, as flags of Megatron-LM."""
    keys = job.command
    style = keys.text("--lr_scheduler_type")
    pairs = {
        "--lr": keys.text("--learning_rate"),
        "--train-iters": keys.text("--max_steps"),
        "--seed": keys.text("--seed"),
        "--clip-grad": keys.text("--max_grad_norm"),
        "--weight-decay": keys.text("--weight_decay"),
        "--adam-beta1": keys.text("--adam_beta1"),
        "--adam-beta2": keys.text("--adam_beta2"),
        "--adam-eps": keys.text("--adam_epsilon"),
        "--lr-warmup-iters": keys.text("--warmup_steps"),
        "--log-interval": keys.text("--logging_steps"),
        "--lr-decay-style": style if style in ("linear", "cosine", "constant") else None,
    }
    return {name: value for name, value in pairs.items() if value and not value.startswith("-")}
