"""The training command of a script, and the number of devices on which its launcher starts it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field

from costmodels.dataclass import dataclass
from planner.formats.facts.flag_catalogue import known_flags
from planner.formats.shell.script import Script, read_script
from planner.formats.shell.text import Word

LAUNCHERS = (
    "torchrun",
    "swift",
    "megatron",
    "llamafactory-cli",
    "python",
    "python3",
    "srun",
    "mpirun",
    "deepspeed",
    "accelerate",
    "msrun",
    "horovodrun",
)

LAUNCHER_MODULES = ("torch.distributed", "accelerate.commands.launch", "deepspeed.launcher")
"""Modules that start another program (`python -m torch.distributed.run`)."""

PER_NODE = (
    *("--nproc_per_node", "--nproc-per-node", "--local_worker_num", "--num_gpus", "--gpus-per-node"),
    *("--npus-per-node", "--gres", "--ntasks-per-node"),
)
"""Flags of launchers and batch systems for the devices of a node; the first given one counts."""

NODES = ("--nnodes", "-N", "--nodes", "--num_nodes", "--num_machines")
ALL = ("-np", "--np", "--ntasks", "-n", "--num_processes", "--worker_num")


@dataclass(frozen=True)
class Launch:
    """The training command of a script."""

    program: str
    """The started file or module."""
    arguments: tuple[Word, ...]
    nodes: Word | None
    per_node: Word | None
    total: Word | None
    """Number of processes on all nodes, if the launcher gives it."""
    cuda_connections: Word | None = None
    """Value of `CUDA_DEVICE_MAX_CONNECTIONS`."""
    printed: bool = False
    """True if the launch is the text that another command prints."""
    assigned: frozenset[str] = frozenset()
    """Variables that the script sets or may set, without those of branches that do not run."""
    launcher: tuple[Word, ...] = ()
    """The words before the program: the launcher with its flags."""
    environment: Mapping[str, Word] = field(default_factory=dict)
    """The environment variables of the command that launchers read."""
    files: Mapping[str, Word] = field(default_factory=dict)
    """Texts that the script writes into files, by file name."""
    not_sourced: tuple[Word, ...] = ()
    """Files that the script sources and that are not given."""


def find_launch(
    source: str, defined: dict[str, str], beside: Mapping[str, str] | None = None
) -> Launch | None:
    """The training command of a script, of a page with scripts, or of a bare list of arguments.

    It is the command with the most flags of Megatron-LM; None where no command has three of them. Printed
    commands count only if no other command has such flags, as some scripts print a command and then run it
    unquoted.

    Args:
        beside: texts of other files by name, which the script may source.
    """
    best: tuple[tuple[bool, int], Launch] | None = None
    for found in commands(source, defined, beside):
        launch = _with_hyphens(found)
        count = known_count(launch)
        rank = (not launch.printed, count)
        if count >= 3 and (best is None or rank > best[0]):
            best = rank, launch
    return None if best is None else best[1]


_UNDERSCORES = {
    *("--num_layers", "--hidden_size", "--num_attention_heads", "--tensor_model_parallel_size"),
    *("--pipeline_model_parallel_size", "--micro_batch_size", "--global_batch_size"),
}


def _with_hyphens(launch: Launch) -> Launch:
    """A command of a fork whose flags have underscores (Megatron-LLM), with Megatron-LM's hyphens."""
    if len(_UNDERSCORES & {word.text.partition("=")[0] for word in launch.arguments}) < 3:
        return launch
    known, arguments = known_flags(), []
    for word in launch.arguments:
        name, equals, value = word.text.partition("=")
        hyphened = name.replace("_", "-")
        usual = name.startswith("--") and name not in known and hyphened in known
        arguments.append(dataclasses.replace(word, text=hyphened + equals + value) if usual else word)
    return dataclasses.replace(launch, arguments=tuple(arguments))


def known_count(launch: Launch) -> int:
    """Number of a command's flags that Megatron-LM or MindSpeed knows."""
    return len({word.text.partition("=")[0] for word in launch.arguments} & known_flags().keys())


def commands(
    source: str, defined: dict[str, str], beside: Mapping[str, str] | None = None
) -> Iterator[Launch]:
    """Every command of a script, of a page with scripts in it, or of a bare list of arguments."""
    for line, part in _scripts(source):
        script = read_script("\n" * (line - 1) + part, defined, beside)
        for command, environment in zip(script.commands, script.environments, strict=True):
            yield _launch(command, script, environment)


_COMMAND = re.compile(rf"\s*(?:{'|'.join(LAUNCHERS)})\b")


_HERE = re.compile(r"<<-?\s*[\"'\\]?\w")


def _scripts(source: str) -> Iterator[tuple[int, str]]:
    """Parts of a text that are scripts, and the line on which each begins.

    In a page of documentation, scripts begin with `#!` and commands begin with a launcher.
    """
    lines = source.split("\n")
    starts = [
        at
        for at, line in enumerate(lines)
        if re.match(r"\s*#!\s*/", line) and not (at and _HERE.search(lines[at - 1]))  # A script in a script.
    ]
    first = next((at for at, line in enumerate(lines) if line.strip()), 0)
    if starts and starts[0] > first:
        for at, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            yield at + 1, "\n".join(lines[at:end])
        return
    if lines[first].lstrip().startswith("--"):
        yield first + 1, "arguments " + re.sub(r"\\?\n", " \\\\\n", "\n".join(lines[first:]).rstrip("\\ \n"))
        return
    yield 1, source
    yield from _blocks(lines)
    for at, line in enumerate(lines):
        if _COMMAND.match(line) and line.rstrip().endswith("\\"):
            end = at
            while end < len(lines) and lines[end].rstrip().endswith("\\"):
                end += 1
            yield at + 1, "\n".join(lines[at : end + 1])


_FENCE = re.compile(r"\s*(```+|~~~+)\s*(\w*)")


def _blocks(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Blocks of shell code in a page of Markdown, and the line on which each begins."""
    start: int | None = None
    for at, line in enumerate(lines):
        match = _FENCE.match(line)
        if match is None:
            continue
        if start is not None:
            yield start + 1, "\n".join(lines[start:at])
            start = None
        elif match.group(2).lower() in ("", "bash", "sh", "shell", "console", "zsh"):
            start = at + 1


STARTERS = ("swift", "megatron", "llamafactory-cli", "llamafactory", "xtuner", "axolotl")
"""Programs that start torchrun themselves and are configured by variables."""


ON_ALL_DEVICES = ("llamafactory-cli", "llamafactory", "axolotl")
"""Programs that use all devices of the node where nothing says how many (llamafactory/launcher.py)."""


def visible_devices(environment: Mapping[str, Word]) -> Word | None:
    """The number of devices that a job may see, where a variable lists them."""
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        listed = environment.get(name)
        if listed is not None and re.fullmatch(r"[0-9]+(,[0-9]+)*", listed.text):
            return Word(str(listed.text.count(",") + 1), listed.line)
    return None


def _launch(command: Sequence[Word], script: Script, environment: Mapping[str, Word]) -> Launch:
    at = _program(command)
    own = command[:at]
    starts = at + 1 < len(command) and command[at].text.rpartition("/")[2] in STARTERS
    if starts:
        # The program is its first argument: `swift sft`, `megatron pt`.
        at, own = at + 1, command[: at + 1]
    nodes, per_node = _counted_by(own, environment, starts)
    batch = [word for directive in script.directives for word in directive]
    return Launch(
        program=command[min(at, len(command) - 1)].text,
        arguments=tuple(command[at + 1 :]),
        nodes=_counted(_value(own, NODES) or nodes, _value(batch, NODES)),
        per_node=_counted(_value(own, PER_NODE) or per_node, _value(batch, PER_NODE)),
        total=_counted(_value(own, ALL), _value(batch, ALL)),
        cuda_connections=script.variables.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        printed=command[0].text in ("echo", "printf"),
        environment=environment,
        files=script.files,
        not_sourced=script.not_sourced,
        assigned=frozenset(script.variables),
        launcher=tuple(own),
    )


def _counted_by(
    own: Sequence[Word], environment: Mapping[str, Word], starts: bool
) -> tuple[Word | None, Word | None]:
    """Numbers of nodes and of devices per node, from variables or from a list (`--include localhost:0,1`)."""
    if starts:
        per_node = environment.get("NPROC_PER_NODE")
        if per_node is None and own[-1].text.rpartition("/")[2] in ON_ALL_DEVICES:
            per_node = visible_devices(environment)
            return (environment.get("NNODES") or Word("1", own[0].line)), per_node
        return environment.get("NNODES"), per_node or Word("1", own[0].line)
    listed = _value(own, ("--include", "-i"))
    if listed is not None and any(word.text == "deepspeed" for word in own):
        hosts = [host.partition(":") for host in listed.text.split("@")]
        slots = {len(numbers.split(",")) for _, colon, numbers in hosts if colon}
        if len(slots) == 1:
            return Word(str(len(hosts)), listed.line), Word(str(slots.pop()), listed.line)
    return None, None


def _counted(own: Word | None, batch: Word | None) -> Word | None:
    """The launcher's count; if it is not a number, the count given to the batch system."""
    return own if count_of(own) is not None or (own is not None and batch is None) else batch


def _program(command: Sequence[Word]) -> int:
    """Index of the word that names the started program, after all launchers."""
    found = 0
    for at, word in enumerate(command):
        if word.text.endswith(".py"):
            return at
        if word.text in ("-m", "--module") and at + 1 < len(command):
            found = at + 1
            if not command[found].text.startswith(LAUNCHER_MODULES):
                return found
    return found


def _value(words: Sequence[Word], names: Iterable[str]) -> Word | None:
    """The value of the first given flag of `names`."""
    given: dict[str, Word] = {}
    for at, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if equals:
            given.setdefault(name, Word(value.rpartition(":")[2] if name == "--gres" else value, word.line))
        elif re.fullmatch(r"-[A-Za-z][0-9]+", name):
            given.setdefault(name[:2], Word(name[2:], word.line))
        elif at + 1 < len(words):
            given.setdefault(name, words[at + 1])
    return next((given[name] for name in names if name in given), None)


_NODES = re.compile(r"[節节][點点][數数]量[^0-9\n]{0,12}([0-9]{1,4})")
_DEVICES = re.compile(r"GPU[^0-9\n]{0,3}卡[數数][^0-9\n]{0,6}([0-9]{1,3})")


def flag_values(words: Sequence[Word]) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Flags of a command: names with underscores and without leading hyphens, values, and lines."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("--") or len(word.text) < 3:
            continue
        name, equals, value = word.text[2:].partition("=")
        values = [value] if equals else []
        while at < len(words) and not words[at].text.startswith("--") and not equals:
            if not (values and words[at].is_variable):  # Else it may hold further flags.
                values.append(words[at].text)
            at += 1
        yield name.replace("-", "_"), tuple(values), word.line


def sizes_on_page(text: str) -> tuple[int | None, int | None]:
    """Numbers of nodes and of GPUs per node that a page of PAI gives beside its command."""
    found = [pattern.search(text) for pattern in (_NODES, _DEVICES)]
    nodes, devices = (int(match.group(1)) or None if match else None for match in found)
    return nodes, devices


def world_size(launch: Launch, nodes: int | None = None, per_node: int | None = None) -> int | None:
    """Number of devices on all nodes, from the launcher; `nodes` and `per_node` replace missing counts."""
    nodes, per_node = count_of(launch.nodes) or nodes, count_of(launch.per_node) or per_node
    if launch.nodes is None and per_node and launch.total is None:
        return per_node  # torchrun's default is one node.
    return nodes * per_node if nodes and per_node else count_of(launch.total)


def count_of(word: Word | None) -> int | None:
    """The number in a word; for a range of nodes (`1:4`) the largest. None for any other word."""
    text = "" if word is None else word.text.rpartition(":")[2]
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) and int(text) > 0 else None
