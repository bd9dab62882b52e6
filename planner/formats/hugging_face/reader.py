"""Jobs of Hugging Face's trainer: a command, accelerate's YAML and DeepSpeed's JSON, in any combination.

Missing values have the defaults of transformers' TrainingArguments (training_args.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from costmodels.spec.layout import Layout, Optimizer
from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.keyed import Keyed, known_keys
from planner.formats.facts.launcher import Launch, commands, count_of, flag_values, visible_devices
from planner.formats.facts.launcher import world_size as launched
from planner.formats.facts.layout_fields import Places, build_layout, degrees_of_world
from planner.formats.facts.open_words import deciding_names, loose_words, name_open_words
from planner.formats.facts.optimizers import optimizer_named
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.hugging_face import deepspeed_config
from planner.formats.hugging_face.accelerate_flags import accelerate_entries
from planner.formats.hugging_face.accelerate_names import STRATEGIES
from planner.formats.hugging_face.adapters import with_adapters
from planner.formats.hugging_face.engine_constants import Facts, engine_constants
from planner.formats.hugging_face.fsdp_files import is_fsdp, under_fsdp
from planner.formats.hugging_face.job import Job, software_of
from planner.formats.hugging_face.names import (
    ACCELERATE_KEYS,
    DEEPSPEED_KEYS,
    FLAGS,
    MICRO,
    STEPS,
)
from planner.formats.hugging_face.sharding import sharding_of
from planner.formats.hugging_face.step import (
    SHORTER,
    batch_of,
    keeps_fewer_activations,
    keeps_less,
    packs_samples,
    precision_of,
    recomputes,
    trains_in_16_bits,
)
from planner.formats.hugging_face.trainer_files import as_flags
from planner.inputs.huggingface.script_names import model_of
from planner.inputs.model import with_seq

TRAINING_COMMANDS = ("sft", "pt", "rlhf", "train")
"""Commands of ms-swift, LLaMA-Factory and TRL that train with any flags."""

FEWEST_FLAGS = 3
"""Least number of TrainingArguments flags of a training command."""

MODEL_NAMES = ("--model_name_or_path", "--model_name", "--config_name", "--tokenizer_name")
"""Flags that name a model, or a checkpoint or tokenizer of the same shape."""

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
    """A reader for a trainer's YAML without other files."""
    return lambda source, around: read_hugging_face(None, None, None, around, source, software)


def find_command(
    source: str,
    define: Mapping[str, str],
    beside: Mapping[str, str] | None = None,
    files: Sequence[str] = (),
) -> tuple[Launch, Entries] | None:
    """The command that trains with Hugging Face's trainer, and its flags; None where there is none.

    Args:
        files: configurations of a trainer; a command that names one of them is a training command.
    """
    names = {file.rpartition("/")[2] for file in files}
    known = known_keys("transformers")
    best: tuple[int, Launch, Entries] | None = None
    for launch in commands(source, dict(define), beside):
        entries = _flag_entries(launch)
        count = sum(path in known for path in entries)
        if names & {word.text.rpartition("/")[2] for word in launch.arguments} or (
            software_of(launch) != "transformers" and launch.program in TRAINING_COMMANDS
        ):
            count += FEWEST_FLAGS
        if count >= FEWEST_FLAGS and (best is None or count > best[0]):
            best = count, launch, entries
    return None if best is None else best[1:]


def _flag_entries(launch: Launch) -> Entries:
    """Flags with their values; names with hyphens are changed to underscores."""
    return {
        f"--{name}": Entry(f"--{name}", " ".join(values) if values else "true", line)
        for name, values, line in flag_values(launch.arguments)
    }


class Files(NamedTuple):
    """The files of one job, at least one of them."""

    command: Source | None
    accelerate: Source | None
    deepspeed: Source | None
    trainer: Source | None

    @property
    def main(self) -> Source:
        """The file with the most facts about the job."""
        main = self.trainer or self.accelerate or self.deepspeed or self.command
        assert main is not None
        return main


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
        trainer: the YAML of a trainer built on Hugging Face's; `software` names that trainer.
    """
    files = Files(command, accelerate, deepspeed, trainer)
    problems = Problems(files.main.file)
    found = None
    if command is not None:
        names_of_files = () if trainer is None else (trainer.file,)
        found = find_command(command.text, around.define, around.beside, names_of_files)
    job, files = _job_of(files, found, around, software, problems)
    _name_missing_files(files, found, job)
    if command is not None and found is not None:
        deciding = deciding_names(command.text, found[0], _decides)
        name_open_words(loose_words(found[0].arguments), deciding, problems)
    assumed: list[str] = []
    names = {**FLAGS}
    names |= ACCELERATE_KEYS if files.accelerate else {}
    names |= DEEPSPEED_KEYS if files.deepspeed else {}
    given = tuple(dataclasses.replace(flag) for keys in job.all for flag in keys.flags() if flag.line)
    if around.model is not None:
        for name in (*MODEL_NAMES, "--model"):
            job.command.entries.pop(name, None)
    model = _model(job, around, assumed)
    if job.alone:
        assumed.append("the training script, which is not given, learns the next token of one model")
    world = around.world_size or _world(job)
    if world is None:
        text = "the number of devices is not known: the launcher says it"
        problems.add("unknown", text, "num_processes" if files.accelerate else "", None, "give --world-size")
    _check_agreement(job)
    layout = None
    precision = precision_of(job)
    if model is not None and world is not None:
        places = Places(names, {flag.name: flag.line for flag in given})
        layout = _layout(job, model, world, places, assumed)
    _name_unknown_keys(job, problems)
    _check_visible_devices(job)
    narrow = precision == "bf16" and trains_in_16_bits(job)
    if not packs_samples(job):
        assumed.append(SHORTER)
    engine = _engine(job, files, layout)
    facts = Facts(engine, 0 if layout is None else layout.zero_stage, world, narrow)
    return Reading(
        framework=_framework(job, files, software),
        engine=engine,
        engine_constants=engine_constants(job, model, facts),
        file=files.main.file,
        model=model,
        layout=layout,
        program="" if job.launch is None else job.launch.program,
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
        memory_is_bound=keeps_less(job),
        activations_are_bound=keeps_fewer_activations(job, model),
    )


def _decides(flag: str) -> bool:
    role = known_keys("transformers").get(flag.replace("-", "_").replace("__", "--", 1), "unknown")
    return role not in ("harmless", "training")


def _job_of(
    files: Files,
    found: tuple[Launch, Entries] | None,
    around: Surroundings,
    software: str,
    problems: Problems,
) -> tuple[Job, Files]:
    """The keys of each file with the caller's definitions, including the file that a script writes.

    Args:
        found: the training command, and its flags.
    """
    launch, of_command = found if found is not None else (None, {})
    trainer, accelerate = files.trainer, files.accelerate
    of_trainer, of_accelerate = ({}, {}) if trainer is None else as_flags(trainer.entries, software)
    flags = of_trainer | {name: entry for name, entry in of_command.items() if name != "--config"}
    if files.deepspeed is None and launch is not None and "--deepspeed" in flags:
        written = deepspeed_config.written_by(launch, flags["--deepspeed"].text, files.main.file)
        files = files._replace(deepspeed=written)
    launched_with = accelerate_entries(launch)
    launched_with.pop("config_file", None)
    of_file: Entries = {}
    if accelerate is not None:
        of_file = under_fsdp(accelerate.entries) if is_fsdp(accelerate.entries) else accelerate.entries
    of_accelerate = of_file | of_accelerate | launched_with

    def keyed(framework: str, source: Source | None, entries: Entries, has: bool) -> Keyed:
        file = files.main.file if source is None else source.file
        known = known_keys(framework) if has else ()
        return Keyed(with_definitions(entries, around.define, known), framework, file, problems)

    deepspeed = files.deepspeed
    job = Job(
        keyed("transformers", trainer or files.command, flags, True),
        keyed("accelerate", accelerate or trainer or files.command, of_accelerate, bool(of_accelerate)),
        keyed("deepspeed", deepspeed, deepspeed.entries if deepspeed else {}, deepspeed is not None),
        launch,
        software or software_of(launch),
        files.command is None and trainer is None,
    )
    return job, files


def _name_missing_files(files: Files, found: tuple[Launch, Entries] | None, job: Job) -> None:
    """Add problems for files of accelerate and of the trainer that a command names and that are not given."""
    named = accelerate_entries(job.launch).get("config_file")
    if named is not None and files.accelerate is None:
        text = f"{named.text} says how the job is split, and is not given"
        file = files.command.file if files.command else ""
        job.command.problems.add("unknown", text, "--config_file", named.line, "give that file too", file)
    config = None if files.trainer is not None or found is None else found[1].get("--config")
    if config is not None and config.text.endswith((".yaml", ".yml", ".json")):
        text = f"{config.text} says the arguments of the trainer, and is not given"
        job.command.add("unknown", text, "--config", "give that file too")


_DEQUANTIZES = "--model_quantization_config_kwargs.dequantize"


def _name_unknown_keys(job: Job, problems: Problems) -> None:
    """Add problems for keys that are not read, and for flags that the software does not have."""
    if (job.command.text(_DEQUANTIZES) or "").lower() == "true":
        # The weights that are read in few bits train in the usual number format.
        for name in (_DEQUANTIZES, "--model_quantization_config"):
            job.command.entries.pop(name, None)
    for keys in job.all:
        keys.name_unread()
        others = [flag for flag in keys.flags() if flag.line]
        name_others(
            others, problems, "is no key or flag of Hugging Face's trainer that is known here", keys.file
        )


def _is_zero(job: Job, files: Files) -> bool:
    """Return whether DeepSpeed shards the job's state."""
    return files.deepspeed is not None or job.uses_deepspeed


def _framework(job: Job, files: Files, software: str) -> str:
    """The software named to the user: the caller's, the command's, or the one that shards the job."""
    if software or job.software != "transformers":
        return software or job.software
    splits = files.accelerate is not None and not is_fsdp(files.accelerate.entries)
    if splits and not files.deepspeed:
        return "accelerate"
    return "deepspeed" if _is_zero(job, files) else "transformers"


def _engine(job: Job, files: Files, layout: Layout | None) -> str:
    """The engine for the price of the job; FSDP combined with other splits is priced as torchtitan."""
    if _is_zero(job, files):
        return "deepspeed"
    split = layout is not None and (layout.tensor_parallel > 1 or layout.context_parallel > 1)
    return "torchtitan" if split and job.is_under_fsdp else "fsdp"


def _check_visible_devices(job: Job) -> None:
    """Check that ms-swift's processes see one device each.

    Layers are spread over several ones (swift/utils/env.py, `is_mp`), but not under DeepSpeed or FSDP.
    """
    if job.software != "ms-swift" or job.launch is None:
        return
    environment = job.launch.environment
    visible, processes = count_of(visible_devices(environment)), _per_node(job)
    single = "SWIFT_SINGLE_DEVICE_MODE" in environment or "--use_ray" in job.command
    if visible is None or processes is None or single or visible <= processes:
        return
    remedy = f"give NPROC_PER_NODE={visible}"
    if visible % processes:
        text = f"{processes} processes do not divide {visible} visible devices"
        job.command.problems.add("illegal", text, remedy=remedy)
    elif job.uses_deepspeed or job.is_under_fsdp:
        text = f"DeepSpeed and FSDP want a process for each of {visible} visible devices, not {processes}"
        job.command.problems.add("illegal", text, remedy=remedy)
    else:
        text = f"each process spreads its layers over {visible // processes} devices, which is not priced"
        job.command.problems.add("unknown", text, remedy=remedy, of_price=True)


def _world(job: Job) -> int | None:
    if job.launch is not None:
        devices = launched(job.launch)
        if devices is not None:
            return devices
    return job.accelerate.count("num_processes")


def _per_node(job: Job) -> int | None:
    if job.launch is not None and count_of(job.launch.per_node):
        return count_of(job.launch.per_node)
    total, machines = job.accelerate.count("num_processes"), job.accelerate.count("num_machines")
    return total // machines if total and machines and total % machines == 0 else None


def _model(job: Job, around: Surroundings, assumed: list[str]) -> ModelSpec | None:
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
    ranks = (job.command.count(SEQUENCES) or 1) if job.software == "ms-swift" else 1
    if seq is not None and seq % ranks:
        seq += ranks - seq % ranks  # ms-swift pads samples to a multiple (swift/trainers/sequence_parallel).
    return with_adapters(with_seq(model, seq), job.command, job.software)


def _check_agreement(job: Job) -> None:
    """Check that DeepSpeed's file agrees with the flags, or has `auto`
    (transformers/integrations/deepspeed.py)."""
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


def _layout(job: Job, model: ModelSpec, world: int, places: Places, assumed: list[str]) -> Layout | None:
    degrees: dict[str, Any] = {
        "tensor_parallel": job.deepspeed.count(DEEPSPEED_KEYS["tensor_parallel"])
        or job.accelerate.count(ACCELERATE_KEYS["tensor_parallel"])
        or 1,
        "context_parallel": _context(job),
    }
    if degrees["context_parallel"] > 1:
        heads = "parallelism_config.parallelism_config_sp_size" in job.accelerate
        ulysses = heads or DEEPSPEED_KEYS["context_parallel"] in job.deepspeed or SEQUENCES in job.command
        strategy = job.accelerate.choice(ACCELERATE_KEYS["context_parallel_form"], STRATEGIES, "allgather")
        degrees["context_parallel_form"] = "all_to_all" if ulysses else STRATEGIES[strategy]
    if job.distributed == "megatron_lm":
        text = "MEGATRON_LM is not read here; give the flags of Megatron-LM in a script"
        job.accelerate.add("unknown", text, "distributed_type")
        return None
    whole = degrees_of_world(degrees, world, places, job.command.problems)
    if whole is None:
        return None
    ranks = whole["data_parallel"]
    whole |= {"layers_per_stage": (model.layers,), "precision": precision_of(job)}
    whole |= sharding_of(job, whole)
    whole |= batch_of(job, ranks, assumed)
    if recomputes(job):
        whole["recompute"] = "full"
    whole["optimizer"] = _optimizer(job)
    if any(problem.severity == "illegal" for problem in job.command.problems.found):
        return None
    return build_layout(whole, places, job.command.problems)


def _context(job: Job) -> int:
    at = "parallelism_config.parallelism_config"
    ulysses = job.deepspeed.count(DEEPSPEED_KEYS["context_parallel"]) or job.accelerate.count(f"{at}_sp_size")
    if job.software == "ms-swift":
        ulysses = ulysses or job.command.count(SEQUENCES)
    elif (job.command.text(SEQUENCES) or "1") != "1":
        text = "how a trainer that is not ms-swift splits sequences is not known"
        job.command.add("unknown", text, SEQUENCES, "give --define sequence_parallel_size=")
    return job.accelerate.count(f"{at}_cp_size") or ulysses or 1


SEQUENCES = "--sequence_parallel_size"
"""Flag of ms-swift for ranks that split sequences, and heads in attention
(swift/trainers/sequence_parallel)."""

SWITCHED = ("--use_muon", "--use_apollo", "--use_badam", "--use_adam_mini", "--use_galore")
"""Switches of LLaMA-Factory that select another optimizer than `--optim`."""


def _optimizer(job: Job) -> Optimizer:
    """The optimizer: from a switch, from DeepSpeed's file, or from the trainer."""
    keys, path = job.command, "--optim"
    switch = next((name for name in SWITCHED if name in keys and keys.switch(name)), None)
    if (job.deepspeed.text("optimizer.type") or "auto") != "auto":
        keys, path = job.deepspeed, "optimizer.type"
    name = keys.text(path)
    if switch is not None:
        keys, path, name = job.command, switch, switch.removeprefix("--use_")
    return optimizer_named(name, keys.problems, path, keys.line(path), keys.file)


def _training(job: Job) -> dict[str, str]:
    """The settings of training, as flags of Megatron-LM."""
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
