"""Configurations of GPT-NeoX; its keys are read as flags of Megatron-DeepSpeed."""

from __future__ import annotations

import dataclasses
import re

from costmodels.errors import InputError
from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import Entries, Entry, yaml_entries
from planner.formats.facts.key_table import key_table
from planner.formats.facts.keyed import Keyed
from planner.formats.facts.launcher import Launch
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.megatron.deepspeed_flags import CPU_OPTIMIZER
from planner.formats.megatron.names import DEGREE_FLAGS
from planner.formats.megatron.reader import read_command
from planner.formats.on_megatron.flags import as_flags, renamed
from planner.formats.shell.text import Word

NEOX = {key: flag for flag, key in key_table("gpt-neox").flags.items()}
"""Flags by the keys of GPT-NeoX (keys/gpt-neox.yaml)."""


def is_neox(entries: Entries) -> bool:
    """Return whether keys are those of GPT-NeoX, with underscores or hyphens."""
    names = {path.replace("-", "_") for path in entries}
    return "pipe_parallel_size" in names or {"model_parallel_size", "num_attention_heads"} <= names


def read_neox(source: Source, around: Surroundings) -> Reading:
    """The job that a configuration of GPT-NeoX describes."""
    plain, elsewhere = _of_all_files(source)
    entries = with_definitions(plain, around.define, NEOX)
    problems = Problems(source.file)
    keys = Keyed(entries, "gpt-neox", source.file, problems)
    pairs = _flags_of_keys(keys)
    flags = [
        dataclasses.replace(flag, values=(Word("1", flag.line),))
        if flag.text == "0" and flag.name == DEGREE_FLAGS["pipeline_parallel"]
        else flag
        for flag in as_flags(pairs)
    ]
    micro = "train_micro_batch_size_per_gpu"
    if micro not in entries and "train_batch_size" not in entries:
        text = "is not given, and DeepSpeed has no default for it"
        keys.add("unknown", text, micro, f"give the file with it too, or --define {micro}=N")
        flags += as_flags([("--micro-batch-size", Entry(micro, "1", 0))])
    batch = _neox_batch(keys, around)
    if batch is not None and "train_batch_size" not in entries:
        flags += as_flags([("--global-batch-size", batch)])
    launch = Launch("", (), None, None, None)
    reading = read_command(
        flags,
        [],
        launch,
        source.file,
        world_size=around.world_size,
        local_world_size=around.local_world_size,
        described=around.described,
        framework="megatron-deepspeed",
    )
    rest = [flag for flag in keys.flags() if flag.name not in NEOX and flag.line]
    name_others(rest, problems, "is no key of GPT-NeoX that is known here")
    found = reading.problems
    if other := _attention(keys) - {"global", "flash"}:
        kinds, line = sorted(other), _of_attention(keys)[0].line
        problems.add("unknown", f"layers of {', '.join(kinds)} are not priced", "attention_config", line)
        found = tuple(one for one in found if one.severity != "illegal")  # They have no heads.
    model = reading.model
    if model is not None and keys.switch("gpt_j_residual"):
        model = model.model_copy(update={"parallel_residual": True})
    reading = dataclasses.replace(
        reading, model=model, flags=(*reading.flags, *rest), problems=(*problems.found, *found)
    )
    reading = renamed(reading, {flag: path for path, flag in NEOX.items()}, "gpt-neox", reading.engine)
    placed = (
        dataclasses.replace(one, file=elsewhere[one.flag]) if one.flag in elsewhere else one
        for one in reading.problems
    )
    return dataclasses.replace(
        reading, problems=tuple(placed), files=elsewhere, words={**reading.words, **_CHANGED}
    )


_CHANGED = {
    "--checkpoint-num-layers": "checkpoint_num_layers",
    CPU_OPTIMIZER: "zero_optimization.cpu_offload",
}
"""Keys by flags of Megatron-DeepSpeed, beside those of keys/gpt-neox.yaml."""


def _flags_of_keys(keys: Keyed) -> list[tuple[str, Entry]]:
    """Flags of Megatron-DeepSpeed with the values of keys, and flags that follow from the values."""
    pairs = [(flag, keys.entries[path]) for path, flag in NEOX.items() if path in keys.entries]
    made: list[tuple[str, Entry]] = [("--deepspeed", Entry("", "true", 0))]
    if _attention(keys) == {"flash"}:
        made.append(("--use-flash-attn", Entry("", "true", 0)))
    if (keys.text("precision") or "") == "bfloat16":
        made.append(("--bf16", keys.entries["precision"]))
    if (keys.text("activation") or "").lower() in ("swiglu", "geglu"):
        made.append(("--swiglu", keys.entries["activation"]))
        pairs = [(flag, entry) for flag, entry in pairs if flag != "--ffn-hidden-size"]
        made += _gated_width(keys)
    if "bfloat" in (keys.text("fp16.type") or "").lower():
        pairs = [("--bf16" if flag == "--fp16" else flag, entry) for flag, entry in pairs]
    if "num_kv_heads" in keys.entries:
        made.append(("--group-query-attention", keys.entries["num_kv_heads"]))
    if (keys.count("moe_num_experts") or 1) > 1:
        # neox_arguments/neox_args.py: one expert a token, and experts in every layer, where no key says else.
        defaults = {"moe_top_k": "--moe-router-topk", "moe_expert_interval": "--expert-interval"}
        made += [(flag, Entry("", "1", 0)) for key, flag in defaults.items() if key not in keys.entries]
    offloaded = keys.text("zero_optimization.offload_optimizer.device") or "none"
    if offloaded != "none" or keys.switch("zero_optimization.cpu_offload"):
        made.append(("--optimizer-cpu-offload", Entry("", "true", 0)))
    if "zero_optimization.stage" not in keys.entries:
        made.append(("--zero-stage", Entry("", "0", 0)))
    return [*pairs, *made]


def _of_all_files(source: Source) -> tuple[Entries, dict[str, str]]:
    """The keys of all files of a job, and the file of each key that is not in the first file.

    GPT-NeoX accepts several files, with no key twice (`NeoXArgs.from_ymls`).
    """
    found: Entries = {}
    files: dict[str, str] = {}
    others = [(file, yaml_entries(text, f"file {file}")) for file, text in source.others]
    for file, entries in [(source.file, source.entries), *others]:
        for path, entry in entries.items():
            name = path.replace("-", "_")
            if name in found:
                before = files.get(name, source.file)
                raise InputError(
                    f"files {before} and {file} both have the key {path}, which GPT-NeoX refuses"
                )
            found[name] = dataclasses.replace(entry, path=name)
            if file != source.file:
                files[name] = file
    return found, files


def _of_attention(keys: Keyed) -> list[Entry]:
    return [entry for path, entry in keys.entries.items() if path.split(".")[0] == "attention_config"]


def _attention(keys: Keyed) -> set[str]:
    """Kinds of layers in `attention_config`."""
    text = " ".join(f"{entry.text} {' '.join(entry.items or ())}" for entry in _of_attention(keys))
    return set(re.findall(r"[A-Za-z_]+", text)) - {"all"}


def _gated_width(keys: Keyed) -> list[tuple[str, Entry]]:
    """The width of a gated MLP: a third of `intermediate_size`, or of four times the hidden size.

    A gated MLP then has as many parameters as one without a gate (`ParallelMLP`).
    """
    hidden, whole = keys.count("hidden_size"), keys.count("intermediate_size")
    if whole is None and hidden is not None:
        whole = 4 * hidden
    if whole is None:
        return []
    unit = keys.count("mlp_multiple_of") or 1
    width = unit * -(-(whole * 2 // 3 // 2) // unit)
    entry = keys.entries.get("intermediate_size") or keys.entries["hidden_size"]
    return [("--ffn-hidden-size", Entry(entry.path, str(width), entry.line))]


def _neox_batch(keys: Keyed, around: Surroundings) -> Entry | None:
    """The global batch from microbatches and accumulation steps on all devices."""
    micro, steps = (
        keys.count("train_micro_batch_size_per_gpu"),
        keys.count("gradient_accumulation_steps") or 1,
    )
    shards = 1
    for name in ("pipe_parallel_size", "model_parallel_size", "context_parallel_size"):
        shards *= max(keys.count(name, least=0) or 1, 1)
    if micro is None or around.world_size is None or around.world_size % shards:
        return None
    line = keys.line("gradient_accumulation_steps") or 0
    return Entry("gradient_accumulation_steps", str(micro * steps * (around.world_size // shards)), line)
