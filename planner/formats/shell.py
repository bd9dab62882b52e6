"""Shell scripts, read as far as they say how a job is started: their commands, with variables in place.

Nothing is run and no file is opened. A variable that is set under a condition which cannot be known is not
known either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field

from costmodels.dataclass import dataclass
from planner.formats.expansion import Expansion, Value
from planner.formats.text import (
    DEEPEST,
    Char,
    Chars,
    Closings,
    Unknown,
    Word,
    chars_of,
    has_unknown,
    plain,
    split_words,
    word_of,
)

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?(\+?)=")
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_BEFORE = ("nohup", "time", "exec", "command", "sudo", "then", "do", "else", "{", "!")
_TESTS = ("[", "[[", "test")
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh")
_OPERATORS = ("&&", "||", ";;", "&>", ">>", "<<", "|&", ">&", "<&", ";", "&", "|", "\n", "(", ")", ">", "<")
MOST_FRAMES = 200
"""Constructs inside each other; what opens beyond is not followed."""

_DIRECTIVE = re.compile(r"#(SBATCH|BSUB|PBS|SLURM)\s")


@dataclass(frozen=True)
class Script:
    """What a script would run, and what it sets."""

    commands: tuple[tuple[Word, ...], ...]
    directives: tuple[tuple[Word, ...], ...]
    """What comments for a batch system say, such as `#SBATCH --nodes 4`."""
    variables: Mapping[str, Word]


@dataclass
class _Frame:
    """A construct that is open: an `if`, a loop, a function."""

    kind: str
    runs: bool | None
    """Whether what it holds runs; None where that is not known."""
    done: bool | None = False
    """Whether an earlier branch of an `if` has run."""
    tests: bool = False
    """What is read belongs to the condition of an `if`."""
    condition: list[bool | None] = field(default_factory=list)
    """Outcomes of the commands of the condition."""
    subject: str | None = None
    """Of a `case`."""
    patterns: list[str] | None = None
    """Those of the next branch of a `case`, while they are read."""


def read_script(source: str, defined: Mapping[str, str] | None = None) -> Script:
    """The commands of a shell script.

    Args:
        defined: values of variables that the script gets from outside; they count as set before it begins.
    """
    reader = _Reader({name: list(chars_of(value)) for name, value in (defined or {}).items()})
    reader.read(chars_of(source), 0)
    known = {
        name: word_of([char for char in value if isinstance(char, tuple)])
        for name, value in reader.variables.items()
        if not (value and isinstance(value[0], list))
    }
    return Script(tuple(reader.commands), tuple(reader.directives), known)


class _Reader:
    def __init__(self, variables: dict[str, Value]) -> None:
        self.fixed = set(variables)
        self.variables = variables
        self.commands: list[tuple[Word, ...]] = []
        self.directives: list[tuple[Word, ...]] = []
        self._expansion = Expansion(variables)
        self._frames: list[_Frame] = []
        self._status: bool | None = True

    def read(self, chars: Chars, depth: int) -> None:
        """Go through all commands of a text."""
        joined = "\n"
        for before, raw in _simple_commands(chars, self.directives):
            joined = before if before != "" else joined
            self._keyword(raw, joined, depth)

    def _keyword(self, raw: list[Chars], before: str, depth: int) -> None:
        """Open and close constructs; what is left of a command is run."""
        while raw:
            word = plain(raw[0])
            if word in ("if", "elif", "while", "until", "for", "select", "case", "function"):
                self._open(word, raw)
                if word not in ("if", "elif"):
                    return
                raw, before = raw[1:], "\n"
            elif word in ("then", "else", "fi", "do", "done", "esac", "}"):
                self._turn(word)
                raw, before = raw[1:], "\n"
            elif word == "{":
                self._frames.append(_Frame("{", True))
                raw = raw[1:]
            elif word == "!":
                raw = raw[1:]
            else:
                break
        if raw and not self._is_pattern(raw, before):
            self._simple(raw, before, depth)

    def _is_pattern(self, raw: list[Chars], before: str) -> bool:
        """Whether words choose a branch of a `case`; before a branch it is found out whether that runs."""
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
        known = frame.subject is not None and all(re.fullmatch(r"[\w.\-]+|\*", one) for one in frame.patterns)
        hit = bool({"*", frame.subject} & set(frame.patterns))
        frame.runs = (hit and not frame.done) if known and frame.done is not None else None
        frame.done = True if known and hit else (frame.done if known else None)
        frame.patterns = None
        return False

    def _open(self, word: str, raw: list[Chars]) -> None:
        if len(self._frames) > MOST_FRAMES:
            return
        if word == "if":
            self._frames.append(_Frame("if", True, tests=True))
        elif word == "elif" and self._frames and self._frames[-1].kind == "if":
            frame = self._frames[-1]
            frame.runs, frame.tests, frame.condition = not frame.done, True, []
        elif word == "case":
            chars = [char for each in raw[1:2] for char in self._expansion.value(each)]
            subject = None if has_unknown(chars) else plain(chars)
            patterns = [plain(each).strip("\"'") for each in raw[3:]]
            self._frames.append(_Frame("case", None, subject=subject, patterns=patterns))
        elif word in ("for", "select") and len(raw) > 1:
            self._frames.append(_Frame("loop", None))
            name = plain(raw[1])
            if name.isidentifier():
                self._assign(name, _unknown(name, raw[1][0][1]))
        elif word in ("while", "until"):
            self._frames.append(_Frame("loop", None))

    def _turn(self, word: str) -> None:
        """`then`, `else` and the ends of constructs."""
        if word in ("fi", "done", "esac", "}"):
            if self._frames:
                self._frames.pop()
            return
        if not self._frames or self._frames[-1].kind != "if":
            return
        frame = self._frames[-1]
        frame.tests = False
        holds = frame.condition[0] if len(frame.condition) == 1 else None
        if word == "else":
            frame.runs = None if frame.done is None else not frame.done
        else:
            frame.runs = False if frame.done is True else (None if frame.done is None else holds)
            frame.done = (
                True if frame.done is True or holds is True else (None if holds is None else frame.done)
            )

    def _runs(self) -> bool | None:
        """Whether what is read now would run: False beats None, and that True."""
        states = [frame.runs for frame in self._frames]
        return False if False in states else (None if None in states else True)

    def _simple(self, raw: list[Chars], before: str, depth: int) -> None:
        """A command without keywords: assignments, tests, and what would be run."""
        runs = self._runs()
        if (before == "&&" and self._status is False) or (before == "||" and self._status is True):
            return
        if runs is False:
            return
        if before in ("&&", "||") and self._status is None:
            runs = None
        while raw and plain(raw[0]) in _BEFORE:
            raw = raw[1:]
        first = plain(raw[0]) if raw else ""
        if first in _TESTS:
            self._status = self._test(raw)
        else:
            # Scripts go on where a command succeeds, and say what to do where it does not.
            self._status = True
        if self._frames and self._frames[-1].tests:
            self._frames[-1].condition.append(self._status if first in _TESTS else None)
        if first in _TESTS:
            return
        while raw and self._assignment(raw[0], runs):
            raw = raw[1:]
        if raw:
            self._command(raw, runs, depth)

    def _command(self, raw: list[Chars], runs: bool | None, depth: int) -> None:
        first = plain(raw[0])
        if first in _DECLARATIONS:
            for word in raw[1:]:
                self._assignment(word, runs)
            return
        if first in ("read", "unset", "mapfile", "readarray"):
            for word in raw[1:]:
                if plain(word).isidentifier():
                    self._assign(plain(word), _unknown(plain(word), word[0][1]))
            return
        parts = [part for word in raw for part in self._expansion.split(word)]
        words = [word_of(part) for part in parts]
        if not words:
            return
        inner = _inner_script(words)
        if inner is not None and depth < DEEPEST:
            at, joined = inner
            text: Chars = []
            for part in parts[at:] if joined else parts[at : at + 1]:
                text += [*part, (" ", part[0][1] if part else 0)]
            own = len(self.commands)
            self.read(text, depth + 1)
            self.commands[own:] = [(*words[:at], *command) for command in self.commands[own:]]
            return
        self.commands.append(tuple(words))

    def _assignment(self, raw: Chars, runs: bool | None) -> bool:
        """Carry out `NAME=value`; whether it was one."""
        match = _ASSIGNMENT.match(plain(raw[:300]))
        if match is None:
            return False
        name, adds = match.groups()
        value = raw[match.end() :]
        new: Value
        if value and value[0][0] == "(" and value[-1][0] == ")":
            elements = [part for word in _array_words(value[1:-1]) for part in self._expansion.split(word)]
            new = elements or []
        else:
            new = self._expansion.value(value)
        old = self.variables.get(name)
        if adds and old is not None:
            new = _joined(old, new)
        if "[" in match.group(0) or (runs is None and old != new):
            new = _unknown(name, raw[0][1])
        self._assign(name, new)
        return True

    def _assign(self, name: str, value: Value) -> None:
        if name not in self.fixed:
            self.variables[name] = value

    def _test(self, raw: list[Chars]) -> bool | None:
        """The outcome of `[ ... ]`, None where it is not known: files are never looked at."""
        words = [self._expansion.value(word) for word in raw[1:]]
        texts = [plain(word) for word in words]
        if len(words) >= 2 and texts[0] in ("-z", "-n") and self._never_set(words[1]):
            # As in `${NAME:-default}`: what a script asks for and never sets is not set.
            return texts[0] == "-z"
        if any(map(has_unknown, words)):
            return None
        if texts and texts[-1] in ("]", "]]"):
            texts.pop()
        elif plain(raw[0]) != "test":
            return None
        negated = False
        while texts and texts[0] == "!":
            negated, texts = not negated, texts[1:]
        holds = _holds(texts)
        return holds if holds is None else holds != negated

    def _never_set(self, value: Chars) -> bool:
        return len(value) == 1 and isinstance(value[0][0], Unknown) and value[0][0] not in self.variables


def _inner_script(words: list[Word]) -> tuple[int, bool] | None:
    """Where the script stands that a command gives to another shell, and whether it goes to the end."""
    for at, word in enumerate(words):
        if word.text == "eval" and at == 0 and len(words) > 1:
            return 1, True
        if word.text in _SHELLS and at + 2 < len(words) and words[at + 1].text in ("-c", "-lc", "-ce", "-cx"):
            return at + 2, False
        if word.text.endswith(".py") or word.text in ("-m", "--module"):
            return None
    return None


def _unknown(name: str, line: int) -> Chars:
    return [(Unknown(name), line)]


def _joined(old: Value, new: Value) -> Value:
    if (old and isinstance(old[0], list)) or (new and isinstance(new[0], list)):
        return [[part] if isinstance(part, tuple) else part for part in (*old, *new)]
    return [char for value in (old, new) for char in value if isinstance(char, tuple)]


def _holds(texts: list[str]) -> bool | None:
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return bool(texts[1]) == (texts[0] == "-n")
    if len(texts) != 3:
        return None
    left, operator, right = texts
    if operator in ("=", "==", "!="):
        return None if "*" in right else (left.strip("\"'") == right.strip("\"'")) == (operator != "!=")
    if not (re.fullmatch(r"-?[0-9]{1,18}", left) and re.fullmatch(r"-?[0-9]{1,18}", right)):
        return None
    a, b = int(left), int(right)
    outcomes = {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}
    return outcomes.get(operator)


def _array_words(chars: Chars) -> Iterator[Chars]:
    """The words between the brackets of an array, which go over lines with comments between them."""
    for _, raw in _simple_commands(chars, []):
        yield from raw


def _simple_commands(chars: Chars, directives: list[tuple[Word, ...]]) -> Iterator[tuple[str, list[Chars]]]:
    """Each command as the operator before it and its words as they are written."""
    closings = Closings(chars)
    at, before, raw = 0, "\n", list[Chars]()
    word: Chars = []
    size = len(chars)
    skips = False  # The next word is a file that output goes to.
    ends: list[str] = []  # Of texts that follow the line.

    def char(index: int) -> str:
        return chars[index][0] if index < size and not isinstance(chars[index][0], Unknown) else ""

    while at <= size:
        here = char(at)
        operator = next((one for one in _OPERATORS if here and _starts(chars, at, one)), "")
        blank = at == size or (here.isspace() and here != "\n")
        if here == "(" and word and plain(word[-1:]) == "=" and _ASSIGNMENT.fullmatch(plain(word)):
            end = _array_end(chars, closings, at)
            word += chars[at:end]
            at = end
            continue
        if here == "<" and (placeholder := _placeholder(chars, at)):
            word.append((Unknown(placeholder), chars[at][1]))
            at += len(placeholder) + 2
            continue
        if here == "#" and not word:
            end = at
            while end < size and char(end) != "\n":
                end += 1
            if _DIRECTIVE.match(plain(chars[at:end])):
                directives.append(tuple(map(word_of, split_words(chars[at + 1 : end]))))
            at = end
            continue
        if here == "\\" and char(at + 1) == "\n":
            at += 2
            blank = True
            if word:
                if not skips:
                    raw.append(word)
                word, skips = [], False
            continue
        if operator and not (operator == "&" and word[-1:] and word[-1][0] == ">"):
            if operator in (">", "<", ">>", "<<", "&>", ">&", "<&") and plain(word).isdigit():
                word = []  # The number of a stream.
            if word and not skips:
                raw.append(word)
            if word and ends and ends[-1] == "":
                ends[-1] = plain(word).strip("-'\"\\")
            word, skips = [], False
            if operator in (">", "<", ">>", "<<", "&>", ">&", "<&"):
                skips = True
                if operator == "<<" and char(at + 2) != "<":
                    ends.append("")
                at += len(operator) + (operator == "<<" and char(at + 2) == "<")
                continue
            if raw:
                yield before, raw
                before, raw = operator, []
            elif operator != "\n" or before not in ("&&", "||", "|", ";;"):
                before = operator
            at += len(operator)
            if operator == "\n" and ends:
                at = _after_texts(chars, at, ends)
                ends = []
            continue
        if blank:
            if word and not skips:
                raw.append(word)
            if word and ends and ends[-1] == "":
                ends[-1] = plain(word).strip("-'\"\\")
            skips = skips and not word
            word = []
            at += 1
            continue
        end = closings.after(at) if closings.opens(at) else at + 1
        word += chars[at:end]
        at = end
    if raw:
        yield before, raw


_PLACEHOLDER = re.compile(r"<([A-Za-z][\w ./:-]{0,80}[\w./])>")


def _placeholder(chars: Chars, at: int) -> str:
    """What `<PATH TO DATA>` stands for, which a reader is to fill in; empty for what sends a file."""
    match = _PLACEHOLDER.match(plain(chars[at : at + 90]))
    return "" if match is None else match.group(1)


def _starts(chars: list[Char], at: int, text: str) -> bool:
    return chars[at][0] == text[0] and plain(chars[at : at + len(text)]) == text


def _array_end(chars: Chars, closings: Closings, at: int) -> int:
    """Index after the bracket that closes an array; the next one where none does."""
    start, comment = at, False
    at += 1
    while at < len(chars):
        here = chars[at][0]
        if comment:
            comment = here != "\n"
            at += 1
            continue
        if here == ")":
            return at + 1
        comment = here == "#" and chars[at - 1][0].isspace()
        at = closings.after(at) if closings.opens(at) else at + 1
    return start + 1


def _after_texts(chars: Chars, at: int, ends: list[str]) -> int:
    """Index after the texts that follow a line with `<<END`."""
    for end in ends:
        while at < len(chars):
            stop = at
            while stop < len(chars) and chars[stop][0] != "\n":
                stop += 1
            line = plain(chars[at:stop]).strip()
            at = stop + 1
            if line == end:
                break
    return min(at, len(chars))
