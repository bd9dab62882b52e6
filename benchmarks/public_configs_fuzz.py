"""Checks that no verdict rests on a fact whose deciding line was removed or changed in a public file.

A line decides a field if no other line of the job's files has both a name of the field and its value. The
line is removed, given another value, or given a value that is known only at run time.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.public_configs import Job, facts_of_reading, jobs, same, table
from costmodels.errors import InputError, on_one_line
from planner.formats.check import name_what_is_missing
from planner.formats.facts.reading import Problems, Reading, verdict
from planner.formats.files import read_files

Change = Literal["removed", "changed", "unreadable"]

_SIZE = r"parallel(ism|[-_](size|degree))?"

NAMES: Mapping[str, str] = {
    "tp": rf"(?<!expert[-_])tensor[-_](model[-_])?{_SIZE}|(?<![a-z])tp(_size)?(?![a-z])"
    r"|(?<![a-z_])model_parallel(_size)?(?!_)|mp_size",
    "pp": rf"pipeline[-_](model[-_])?{_SIZE}(?!_layout)|(?<![a-z])pp(_size)?(?![a-z])"
    r"|pipeline_stage(?!s)|pipe_parallel_size",
    "cp": rf"context[-_](model[-_])?{_SIZE}(?![-_]algo)|(?<![a-z])cp(_size)?(?![a-z])",
    "ep": rf"expert[-_](model[-_])?{_SIZE}(?![a-z_]*tensor)|(?<![a-z])ep(_size)?(?![a-z])",
    "mbs": r"micro[-_]batch(_size|[-_]size(_per_gpu)?)?(?!_num|_inter)|(?<![a-z])mbs(?![a-z])"
    r"|per_device_train_batch_size|local_batch_size",
    "gbs": r"(?<!no-)global[-_]batch([-_]size)?|(?<![a-z])gbs(?![a-z])|step-batch-size-schedule",
    "seq": r"seq[-_]?(len|length)(gth)?|(?<![a-z])max_length|cutoff_len|block_size|model_max_length"
    r"|sequence_len(gth)?",
    "precision": r"bf16|fp16|fp8|precision|compute_dtype|dtype",
}
"""Patterns of names of a field."""

SPELLINGS: Mapping[str, str] = {
    "bf16": "bf16|bfloat16|torch.bfloat16|b?float16",
    "fp16": "fp16|float16|16",
    "fp8": "fp8|float8|hybrid",
    "fp32": "fp32|float32|32",
}
"""Patterns of number formats in files."""

ASIDE = re.compile(
    r"virtual|first|last|eval|val_|valid|warmup|interval|rope|rotary|position|pad_|layers|layout|dtype: null"
    r"|ref\.|rollout|reward|vocab|divisible|import |description|grad_reduce|accumul|softmax|router|export"
    r"|rampup|expr |\$\(\(|layernorm|param_init|amax|fp8[-_](margin|interval|param|recipe)|expert[-_]tensor"
    r"|name|pipeline_parallel_schedule"
)
"""Marks of lines with a field's name in another meaning."""

PLAIN_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("tp", "pp", "cp", "ep"), (1,)),
    "precision": ("fp32",),
}
"""Defaults of fields that are the same in almost all software."""

DEFAULTS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "torchtitan": {"mbs": (8,), "seq": (2048,), "precision": ("bf16",)},
    "transformers": {"mbs": (8,)},
    "deepspeed": {"mbs": (8,)},
    "accelerate": {"mbs": (8,)},
    "trl": {"mbs": (8,), "precision": ("bf16",)},
    "llama-factory": {"mbs": (8,)},
    "open-instruct": {"mbs": (8,)},
    "axolotl": {"mbs": (1,)},
    "nanotron": {"precision": ("bf16",)},
    "ms-swift": {"mbs": (1,), "gbs": (16,), "precision": ("bf16",)},
    "mindformers": {"seq": (1024, 2048), "precision": ("fp16", "bf16")},
    "megatron-bridge": {"precision": ("bf16",)},
    "verl": {"mbs": (4,)},
    "Primus": {"mbs": (2,), "seq": (1024,), "precision": ("bf16",)},
}
"""Documented defaults of fields, by software."""


@dataclass(frozen=True)
class Trial:
    """One change of one file of a job."""

    job: Job
    field: str
    file: str
    line: int
    """The number of the line, from 0."""
    change: Change
    text: str
    """The changed line; empty if it is removed."""
    value: object
    """The value of the changed line; None if it has none."""


def trials(job: Job, folder: Path) -> Iterator[Trial]:
    """All changes of a job, for each field that a single line decides."""
    texts = _texts(job, folder)
    for field, pattern in NAMES.items():
        if field not in job.facts or job.facts[field] == _usual(field):
            continue
        found = list(_deciding(texts, pattern, str(job.facts[field])))
        if len(found) != 1:
            continue
        file, at, line = found[0]
        yield Trial(job, field, file, at, "removed", "", None)
        if field != "precision":
            assert isinstance(job.facts[field], int)
            new = 2 * int(str(job.facts[field]))
            text = _with_value(line, pattern, job.facts[field], str(new))
            yield Trial(job, field, file, at, "changed", text, new)
        unreadable = "$(cat /etc/size)" if _is_shell(file) else "${oc.env:SIZE}"
        if field != "precision" and not file.endswith(".py"):
            text = _with_value(line, pattern, job.facts[field], unreadable)
            yield Trial(job, field, file, at, "unreadable", text, None)


def _texts(job: Job, folder: Path) -> dict[str, str]:
    return {path: (folder / job.repository / path).read_text("utf-8") for path in (job.path, *job.beside)}


def _usual(field: str) -> object:
    return PLAIN_DEFAULTS.get(field, (None,))[0]


def _is_shell(file: str) -> bool:
    return Path(file).suffix in (".sh", ".slurm", ".sbatch", ".md")


def _deciding(texts: Mapping[str, str], pattern: str, value: str) -> Iterator[tuple[str, int, str]]:
    name = re.compile(pattern, re.IGNORECASE)
    words = SPELLINGS.get(value, re.escape(value))
    said = re.compile(rf"(?<![\w.])({words})(?![a-z0-9.])", re.IGNORECASE)
    for file, text in texts.items():
        for at, line in enumerate(text.split("\n")):
            own = line.partition("#")[0] if not line.lstrip().startswith("#SBATCH") else line
            match = name.search(own)
            if match and said.search(own, match.start()) and not ASIDE.search(own.lower()):
                yield file, at, line


def _with_value(line: str, pattern: str, old: object, new: str) -> str:
    """The line with another value after the name of the field."""
    name = re.search(pattern, line, re.IGNORECASE)
    start = 0 if name is None else name.start()
    return line[:start] + re.sub(rf"(?<![\w.]){old}(?![\w.])", lambda match: new, line[start:], count=1)


def outcome(trial: Trial, folder: Path) -> str:
    """The outcome of a changed file, in a few words; one that begins with `fault` is wrong."""
    with tempfile.TemporaryDirectory() as name:
        copies = []
        for path in (trial.job.path, *trial.job.beside):
            copy = Path(name) / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            lines = (folder / trial.job.repository / path).read_text("utf-8").split("\n")
            if path == trial.file:
                lines[trial.line : trial.line + 1] = [trial.text] if trial.text else []
            copy.write_text("\n".join(lines), "utf-8")
            copies.append(copy)
        try:
            reading, legal = _read(copies, trial.job.given)
        except InputError as error:
            return f"refused: {on_one_line(error)}"
    if legal is None:
        return "not known"
    if legal is False:
        return "illegal"
    read = facts_of_reading(reading)[trial.field]
    old = trial.job.facts[trial.field]
    if trial.change == "changed":
        return "the new value" if read == trial.value else _fault(trial, read, old)
    if trial.change == "unreadable":
        return _fault(trial, read, old)
    software = str(trial.job.facts.get("framework"))
    allowed = (*DEFAULTS.get(software, {}).get(trial.field, ()), *PLAIN_DEFAULTS.get(trial.field, ()))
    if any(same(trial.field, one, read) for one in allowed if read is not None):
        return "a documented default"
    others = {path: text for path, text in _texts(trial.job, folder).items() if path != trial.file}
    if any(_deciding(others, NAMES[trial.field], str(read))):
        return "what another file says"
    layout = reading.layout
    if trial.field == "gbs" and layout is not None and layout.micro_batches == 1:
        return "a documented default"  # One microbatch of each replica.
    return _fault(trial, read, old)


def _fault(trial: Trial, read: object, old: object) -> str:
    return f"fault: {trial.field} {old} {trial.change}, and {read} read"


def _read(files: Sequence[Path], given: Mapping[str, Any]) -> tuple[Reading, bool | None]:
    """The check of some files without a search for the best plan."""
    names = ("world_size", "local_world_size", "define", "model")
    reading = read_files(list(files), **{name: given[name] for name in names if name in given})
    problems = Problems(reading.file, list(reading.problems))
    name_what_is_missing(reading, problems)
    return reading, verdict(problems.found)[0]


def fuzz(folder: Path, count: int, seed: int) -> int:
    """Try `count` changes and print their outcomes; returns 1 if a verdict rests on a removed value."""
    every = [trial for job in jobs() for trial in trials(job, folder)]
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    kinds: Counter[tuple[str, str]] = Counter()
    faults = []
    for trial in drawn:
        became = outcome(trial, folder)
        if became.startswith("fault"):
            faults.append(f"{became}: {trial.job.name}: line {trial.line + 1} of {trial.file}")
        kinds[trial.change, became.partition(":")[0]] += 1
    outcomes = (
        "the new value",
        "a documented default",
        "what another file says",
        "not known",
        "illegal",
        "refused",
        "fault",
    )
    rows = [
        [change, *(str(kinds[change, name]) for name in outcomes)]
        for change in ("removed", "changed", "unreadable")
    ]
    print(table((f"{len(drawn)} of {len(every)} changes", *outcomes), rows))
    for fault in faults:
        print(fault)
    return int(bool(faults))
