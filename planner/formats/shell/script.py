"""Shell scripts that start a job: their commands with expanded variables.

Nothing is run and no file is opened. A variable that is set under an unknown condition is unknown. A variable
that a script uses but never sets is unset, as when the script runs unchanged.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from costmodels.dataclass import dataclass
from planner.formats.shell.bodies import LOOPS, TESTS, Event, assigned, body_of, starts_nothing
from planner.formats.shell.commands import SUBSHELL, SUBSHELL_END, TEXT, simple_commands
from planner.formats.shell.conditions import COMPARISONS, Truth, both, either, fits, holds
from planner.formats.shell.expansion import Value
from planner.formats.shell.frames import Frame
from planner.formats.shell.inner_scripts import BATCH, inner_script, started_file, takes_script
from planner.formats.shell.slurm import slurm_variables
from planner.formats.shell.text import (
    DEEPEST,
    Chars,
    Word,
    chars_of,
    has_unknown,
    plain,
    word_of,
)
from planner.formats.shell.variables import Variables, as_assignment, unknown_value

_BEFORE = ("nohup", "time", "exec", "command", "sudo", "then", "do", "else", "{", "!")

MOST_FRAMES = 200
"""Deepest nesting of constructs; deeper ones are not followed."""
MOST_NESTED = 15
"""Deepest nesting of function calls and loops."""
MOST_TURNS = 100
"""Most iterations of a loop."""
MOST_SOURCES = 20
"""Most times that a script sources another one."""
MOST_COMMANDS = 50_000
"""Most commands of a script, including repetitions by loops and calls; beyond, nothing is repeated."""


@dataclass(frozen=True)
class Script:
    """Commands that a script would run, and variables and files that it sets."""

    commands: tuple[tuple[Word, ...], ...]
    directives: tuple[tuple[Word, ...], ...]
    """Comments for a batch system, such as `#SBATCH --nodes 4`."""
    variables: Mapping[str, Word]
    files: Mapping[str, Word]
    """Texts that the script writes into files (`cat <<END > FILE`), by the names of the files."""
    not_sourced: tuple[Word, ...]
    """Files that the script sources and that are not given."""
    environments: tuple[Mapping[str, Word], ...]
    """The environment variables of `ENVIRONMENT` at each command."""


ENVIRONMENT = (
    *("NPROC_PER_NODE", "NNODES", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    *("SWIFT_SINGLE_DEVICE_MODE", "MODULE", "CONFIG", "CONFIG_FILE", "NGPU"),
)
"""Environment variables that launchers and scripts of software read."""


def read_script(
    source: str, defined: Mapping[str, str] | None = None, beside: Mapping[str, str] | None = None
) -> Script:
    """The commands of a shell script.

    Args:
        defined: environment variables of the script, set before it begins. `1`, `2`, ... are its arguments.
        beside: texts of other files by name without folders, which the script may source.
    """
    variables: dict[str, Value] = {name: list(chars_of(value)) for name, value in (defined or {}).items()}
    arguments: list[Chars] = []
    while (argument := (defined or {}).get(str(len(arguments) + 1))) is not None:
        arguments.append(chars_of(argument))
    reader = _Reader(variables, beside or {})
    variables["@"] = arguments
    reader.read(chars_of(source), 0)
    reader.read_uncalled()
    known = {
        name: word_of([char for char in value if isinstance(char, tuple)])
        for name, value in reader.names.variables.items()
        if not (value and isinstance(value[0], list))
    }
    return Script(
        tuple(reader.commands),
        tuple(reader.directives),
        known,
        reader.files,
        tuple(reader.not_sourced),
        tuple(reader.environments),
    )


class _Reader:
    def __init__(self, variables: dict[str, Value], beside: Mapping[str, str]) -> None:
        self.names = Variables(variables, frozenset(variables))
        self.files: dict[str, Word] = {}
        self.not_sourced: list[Word] = []
        self._beside = beside
        self.commands: list[tuple[Word, ...]] = []
        self.environments: list[Mapping[str, Word]] = []
        self.directives: list[tuple[Word, ...]] = []
        self._frames: list[Frame] = []
        self._status: Truth = True
        self._reads_script: tuple[Word, ...] | None = None
        """The last command, where what follows its line is a script for it."""
        self._functions: dict[str, list[Event]] = {}
        self._called: set[str] = set()
        self._nested = 0
        self._left = MOST_COMMANDS
        self._sources = MOST_SOURCES

    def read(self, chars: Chars, depth: int) -> None:
        """Read all commands of a text."""
        events = deque(simple_commands(chars, self.directives))
        for name, (value, line) in slurm_variables(self.directives).items():
            self.names.assign(name, [(char, line) for char in value])
        self._run(events, depth)

    def read_uncalled(self) -> None:
        """Read functions that nothing calls, as a file may consist of functions."""
        self._frames.clear()
        for name in [name for name in self._functions if name not in self._called]:
            self._inside(Frame("call", True), self._functions[name], 0)

    def _run(self, events: deque[Event], depth: int) -> None:
        while events and (self._left > 0 or not self._nested):
            self._left -= 1
            before, raw = events.popleft()
            self._keyword(raw, before, depth, events)

    def _inside(self, frame: Frame, body: Sequence[Event], depth: int) -> None:
        """Read a part of the script in a frame of its own."""
        height = len(self._frames)
        self._frames.append(frame)
        self._nested += 1
        self._run(deque(body), depth)
        self._nested -= 1
        del self._frames[height:]

    def _keyword(self, raw: list[Chars], before: str, depth: int, events: deque[Event]) -> None:
        """Open and close constructs; the rest of the command is read as a command."""
        negated = False
        if before == ")" and raw:
            self._is_pattern(raw, before)
        while raw:
            word = plain(raw[0])
            if word in (SUBSHELL, SUBSHELL_END):
                self._subshell(word, before)
                return
            if word == TEXT:
                self._text(raw)
                return
            if word in LOOPS and self._nested < MOST_NESTED:
                self._loop(raw, events, depth)
                return
            if word == "function":
                self._define(raw, events)
                return
            if word in ("if", "elif", "case", *LOOPS):
                self._open(word, raw)
                if word not in ("if", "elif"):
                    return
                raw, before = raw[1:], "\n"
            elif word in ("then", "else", "fi", "do", "done", "esac", "}"):
                self._turn(word)
                raw, before = raw[1:], "\n"
            elif word == "{":
                self._frames.append(Frame("{", True))
                raw = raw[1:]
            elif word == "!":
                raw, negated = raw[1:], not negated
            else:
                break
        if raw and not self._is_pattern(raw, before):
            self._simple(raw, before, depth, negated)

    def _is_pattern(self, raw: list[Chars], before: str) -> bool:
        """Return whether words belong to the patterns of a `case`. The last pattern of a branch also decides
        whether the branch runs."""
        frame = self._frames[-1] if self._frames else None
        if frame is None or frame.kind != "case":
            return False
        if before == ";;":
            frame.patterns = []
        if frame.patterns is None:
            return False
        if before != ")":
            frame.patterns += [plain(word).strip("\"'") for word in raw]
            return True
        subject = frame.subject
        outcomes = [None if subject is None else fits(subject, pattern) for pattern in frame.patterns]
        hit: Truth = (
            True if "*" in frame.patterns or True in outcomes else None if None in outcomes else False
        )
        if frame.done is None or (hit and subject is None):
            frame.runs = None
        else:
            frame.runs = False if frame.done else hit
            frame.done = frame.done or hit
        frame.patterns = None
        return False

    def _open(self, word: str, raw: list[Chars]) -> None:
        if len(self._frames) > MOST_FRAMES:
            return
        if word == "if":
            self._frames.append(Frame("if", True, tests=True))
        elif word == "elif" and self._frames and self._frames[-1].kind == "if":
            frame = self._frames[-1]
            frame.runs, frame.tests = not frame.done, True
        elif word == "case":
            chars = [char for each in raw[1:2] for char in self.names.expansion.value(each)]
            if self.names.expansion.never_set(chars) and not self._compares_argument(chars):
                chars = []
            subject = None if has_unknown(chars) else plain(chars)
            patterns = [plain(each).strip("\"'") for each in raw[3:]]
            self._frames.append(Frame("case", None, subject=subject, patterns=patterns))
        elif word in LOOPS:
            self._frames.append(Frame("loop", None))

    def _turn(self, word: str) -> None:
        """Handle `then`, `else` and the ends of constructs."""
        if word in ("fi", "done", "esac", "}"):
            if self._frames:
                self._frames.pop()
            return
        if not self._frames or self._frames[-1].kind != "if":
            return
        frame = self._frames[-1]
        frame.tests = False
        if word == "else":
            frame.runs = None if frame.done is None else not frame.done
        else:
            outcome = self._status
            frame.runs = False if frame.done is True else (None if frame.done is None else outcome)
            frame.done = (
                True if frame.done is True or outcome is True else (None if outcome is None else frame.done)
            )

    def _subshell(self, word: str, before: str) -> None:
        """Handle `(` and `)`; variables set between them are restored."""
        if word == SUBSHELL:
            runs: Truth = True
            if before in ("&&", "||"):
                runs = None if self._status is None else self._status is (before == "&&")
            if len(self._frames) <= MOST_FRAMES:
                self._frames.append(Frame(word, runs, outside=dict(self.names.variables)))
            return
        at = next((at for at, frame in reversed([*enumerate(self._frames)]) if frame.kind == SUBSHELL), None)
        if at is not None:
            outside = self._frames[at].outside
            del self._frames[at:]
            if outside is not None:
                self.names.variables.clear()
                self.names.variables.update(outside)

    def _text(self, raw: list[Chars]) -> None:
        """Handle a here-document: for a file, or for the variable of a `read`."""
        _, target, text = raw
        reader, self._reads_script = self._reads_script, None
        if reader is not None and not target and self._nested < MOST_NESTED and self._runs() is not False:
            if reader[0].text in BATCH:
                self.directives.append((Word("SBATCH", reader[0].line), *reader[1:]))
            self._nested += 1
            self.read(self.names.expansion.value(text), 1)
            self._nested -= 1
            return
        if self._runs() is not True:
            return
        if target:
            name = word_of(self.names.expansion.value(target))
            self.files[name.text] = word_of(self.names.expansion.value(text))
        elif self.names.last_read:
            self.names.assign(self.names.last_read, self.names.expansion.value(text))
        self.names.last_read = ""

    def _define(self, raw: list[Chars], events: deque[Event]) -> None:
        """Store the body of a function for its calls."""
        name, rest = (plain(raw[1]) if len(raw) > 1 else ""), raw[2:]
        if not rest and events:
            rest = events.popleft()[1]
        if not rest or plain(rest[0]) != "{":
            events.appendleft(("\n", rest))
            return
        events.appendleft(("\n", rest[1:]))
        self._functions[name] = body_of(events, ("{",), "}")

    def _loop(self, raw: list[Chars], events: deque[Event], depth: int) -> None:
        """Read each iteration if all are known and start nothing; otherwise read the body once, as code that
        may not run."""
        word, head = plain(raw[0]), raw[1:]
        inner = body_of(events, LOOPS, "done")
        if self._runs() is False:
            return
        start = next((at for at, (_, words) in enumerate(inner) if words and plain(words[0]) == "do"), None)
        if start is None:
            self._inside(Frame("loop", None), inner, depth)
            return
        condition: list[Event] = [("\n", head), *inner[:start]]
        body: list[Event] = [("\n", inner[start][1][1:]), *inner[start + 1 :]]
        runs, repeats = self._runs(), starts_nothing(body)
        if word == "while" and runs is True and self._while(condition, body, depth, repeats):
            return
        if word == "for" and head and runs is True and repeats and self._counts(plain(head[0]), body, depth):
            return
        name = plain(head[0]) if word in ("for", "select") and head else ""
        elements = self._elements(head) if word == "for" and runs is True else None
        if elements is not None and (repeats or not elements) and name.isidentifier():
            for element in elements:
                self.names.assign(name, element)
                self._inside(Frame("loop", True), body, depth)
            return
        # A variable that a turn sets is known in that turn, and neither before nor after the loop.
        changed = [
            *([name] if name.isidentifier() else re.findall(r"[A-Za-z_]\w*", name[:1000])),
            *assigned(body),
        ]
        for each in changed:
            if each == name or each in self.names.variables:
                self.names.assign(each, unknown_value(each, raw[0][0][1]))
        self._inside(Frame("loop", True if word in ("for", "while") else None), body, depth)
        for each in changed:
            self.names.assign(each, unknown_value(each, raw[0][0][1]))

    def _counts(self, head: str, body: list[Event], depth: int) -> bool:
        """Read each iteration of `for ((i=0; i<8; i++))`; return False where they are unknown or endless."""
        parts = head[2:-2].split(";")
        if not head.startswith("((") or len(parts) != 3:
            return False
        first, condition, step = (part.strip() for part in parts)
        if first:
            self.names.compute(first, True)
        for _ in range(MOST_TURNS):
            value = self.names.compute(condition, True) if condition else 1
            if not value:
                return value is not None
            self._inside(Frame("loop", True), body, depth)
            if step:
                self.names.compute(step, True)
        return False

    def _elements(self, head: list[Chars]) -> list[Chars] | None:
        """The elements of a `for`; None where unknown."""
        if len(head) < 2 or plain(head[1]) != "in":
            return None
        found = [part for word in head[2:] for part in self.names.expansion.split(word)]
        known = not any(has_unknown(part) or re.search(r"[{*?]", plain(part)) for part in found)
        return found if known and len(found) <= MOST_TURNS else None

    def _while(self, condition: list[Event], body: list[Event], depth: int, repeats: bool) -> bool:
        """Read each iteration while a known condition holds; return False where it is unknown, or endless.

        Without `repeats`, only decide whether there is a first iteration.
        """
        if plain(condition[0][1][0] if condition[0][1] else []) in ("true", ":"):
            return False
        for _ in range(MOST_TURNS):
            self._status = None
            self._inside(Frame("condition", True, tests=True), condition, depth)
            if self._status is not True or not repeats:
                return self._status is False
            self._inside(Frame("loop", True), body, depth)
        return False

    def _runs(self) -> Truth:
        """Return whether the current words would run: False takes precedence over None, and None over
        True."""
        states = [frame.runs for frame in self._frames]
        return False if False in states else (None if None in states else True)

    def _simple(self, raw: list[Chars], before: str, depth: int, negated: bool = False) -> None:
        """Handle a command without keywords: assignments, tests, and started programs."""
        runs, earlier = self._runs(), self._status
        self.names.last_read = ""
        if (before == "&&" and earlier is False) or (before == "||" and earlier is True):
            return
        if runs is False:
            return
        if before in ("&&", "||") and earlier is None:
            runs = None
        while raw and plain(raw[0][:10]) in _BEFORE:
            raw = raw[1:]
        status, is_test = self._outcome(raw, runs)
        status = (not status) if negated and status is not None else status
        joined: dict[str, Callable[[Truth, Truth], Truth]] = {"&&": both, "||": either}
        self._status = joined[before](earlier, status) if before in joined else status
        if is_test:
            return
        count = next((at for at, word in enumerate(raw) if as_assignment(word) is None), len(raw))
        if count < len(raw):
            self._command(raw[count:], raw[:count], runs, depth)
            return
        for word in raw:
            self.names.assignment(word, runs)

    def _outcome(self, raw: list[Chars], runs: Truth) -> tuple[Truth, bool]:
        """Return whether a command succeeds, and whether it is only a test."""
        first = plain(raw[0][:10]) if raw else ""
        if first in TESTS:
            return self._test(raw), True
        if first.startswith("((") and len(raw) == 1:
            value = self.names.compute(plain(self.names.expansion.value(raw[0][2:-2])), runs)
            return (None if value is None else value != 0), True
        if not (self._frames and self._frames[-1].tests):
            # Scripts go on where a command succeeds, and say what to do where it does not.
            return first != "false", False
        if len(raw) == 1:
            first = plain(self.names.expansion.value(raw[0]))
        return ({"true": True, ":": True, "false": False}.get(first)), False

    def _command(self, raw: list[Chars], prefix: list[Chars], runs: Truth, depth: int) -> None:
        if self.names.sets(raw, runs):
            return
        parts = [part for word in raw for part in self.names.expansion.split(word)]
        words = [word_of(part) for part in parts]
        # Variables before a command are for it alone, and its words are older than they.
        names = [match[1] for match in map(as_assignment, prefix) if match]
        saved = {name: self.names.variables[name] for name in names if name in self.names.variables}
        for word in prefix:
            self.names.assignment(word, runs)
        if words:
            self._start(words, parts, runs, depth)
        self.names.variables.update(saved)

    def _start(self, words: list[Word], parts: list[Chars], runs: Truth, depth: int) -> None:
        """Handle a command that starts a script, a function of this script, or another program."""
        if words[0].text in ("source", ".") and len(words) > 1:
            self._source(words[1], depth)
            return
        inner = inner_script(words)
        file = started_file(words, self._beside) if inner is None and depth < DEEPEST else None
        if file is not None and self._sources:
            self._start_file(words, parts, file, depth)
            return
        body = self._functions.get(words[0].text)
        if inner is not None and depth < DEEPEST:
            at, joined = inner
            text: Chars = []
            for part in parts[at:] if joined else parts[at : at + 1]:
                text += [*part, (" ", part[0][1] if part else 0)]
            own = len(self.commands)
            self.read(text, depth + 1)
            self.commands[own:] = [(*words[:at], *command) for command in self.commands[own:]]
        elif body is not None and self._nested < MOST_NESTED:
            self._called.add(words[0].text)
            arguments = self.names.arguments()
            self.names.give_arguments(parts[1:])
            self.names.locals.append({})
            self._inside(Frame("call", runs), body, depth)
            for name, value in self.names.locals.pop().items():
                if value is None:
                    self.names.variables.pop(name, None)
                else:
                    self.names.variables[name] = value
            self.names.give_arguments(arguments)
        else:
            self._reads_script = tuple(words) if takes_script(words) else None
            self.commands.append(tuple(words))
            self.environments.append(self.names.texts(ENVIRONMENT))

    def _start_file(self, words: list[Word], parts: list[Chars], at: int, depth: int) -> None:
        """Read the commands of a given script that a command starts with arguments and exported variables."""
        self._sources -= 1
        if words[0].text in BATCH:
            self.directives.append((Word("SBATCH", words[0].line), *words[1:at]))
        outer = dict(self.names.variables)
        arguments = self.names.arguments()
        passed = {name: outer[name] for name in self.names.exported if name in outer}
        self.names.variables.clear()
        self.names.variables.update(passed)
        for before, word in zip([Word("", 0), *words], words[:at], strict=False):
            name, equals, _ = word.text.partition("=")
            if before.text == "-x" and equals and name.isidentifier():  # mpirun -x NAME=VALUE
                self.names.assign(name, self.names.expansion.value(parts[words.index(word)][len(name) + 1 :]))
        self.names.give_arguments(parts[at + 1 :])
        own = len(self.commands)
        text = self._beside[words[at].text.rpartition("/")[2]]
        self.read([(char, words[at].line) for char in text], depth + 1)
        self.commands[own:] = [(*words[:at], *command) for command in self.commands[own:]]
        self.names.give_arguments(arguments)
        self.names.variables.clear()
        self.names.variables.update(outer)

    def _source(self, file: Word, depth: int) -> None:
        """Read the commands of a sourced file, if it is given."""
        text = self._beside.get(file.text.rpartition("/")[2])
        if text is None:
            self.not_sourced.append(file)
        elif depth < DEEPEST and self._sources:
            self._sources -= 1
            self.read([(char, file.line) for char in text], depth + 1)

    def _compares_argument(self, value: Value) -> bool:
        """Return whether a value that is compared is an argument of the script.

        A script that compares its argument expects one. A loop over all arguments takes those that there are.
        """
        loops = any(frame.kind in ("loop", "condition") for frame in self._frames)
        return not loops and self.names.expansion.is_argument(value)

    def _test(self, raw: list[Chars]) -> Truth:
        """The outcome of `[ ... ]`; None where unknown, as files are never examined."""
        first = plain(raw[0])
        words: list[str | None] = []
        texts = ["", *(plain(word) for word in raw[1:]), "", ""]
        for at, word in enumerate(raw[1:], 1):
            value = self.names.expansion.value(word)
            is_set = not self.names.expansion.never_set(value)
            others = [texts[at + 2 * side] for side in (-1, 1) if texts[at + side] in COMPARISONS]
            if others and not {*others} & {'""', "''"} and self._compares_argument(value):
                words.append(None)
            elif first == "[[" or any(char in "\"'" for char, _ in word):
                words.append("" if not is_set else None if has_unknown(value) else plain(value))
            elif is_set:
                parts = self.names.expansion.split(word)
                words += [None if has_unknown(part) else plain(part) for part in parts]
        if first != "test":
            if not words or words[-1] not in ("]", "]]"):
                return None
            words.pop()
        return holds(words, first == "[[")
