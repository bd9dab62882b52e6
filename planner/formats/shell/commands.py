"""The commands of a shell script as they are written: words, and the operators between them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from costmodels.dataclass import dataclass
from planner.formats.shell.text import Char, Chars, Closings, Unknown, Word, plain, split_words, word_of

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[((?:[^][]|\[[^][]*\])*)\])?(\+?)=")
KEYWORDS = ("if", "elif", "then", "else", "fi", "do", "done", "while", "until", "esac", "{", "}", "!")
"""Words behind which a command begins."""

_OPERATORS = ("&&", "||", ";;", "&>", ">>", "<<", "|&", ">&", "<&", ";", "&", "|", "\n", "(", ")", ">", "<")
SUBSHELL, SUBSHELL_END, TEXT = "(", ")", "<<"
"""First words of what stands for a subshell's begin and end, and for a text that follows a line: the file
that it goes to, or nothing, and the text in quotes."""

_TEST_WORDS = ("&&", "||", "(", ")", "<", ">")
"""Operators that are words between `[[` and `]]`."""
MOST_TEST_WORDS = 60
LONGEST_SUM = 1000
"""Characters of `((...))`."""

_NAME = re.compile(r"[A-Za-z_][\w.:-]*")
_DIRECTIVE = re.compile(r"#(SBATCH|BSUB|PBS|SLURM)\s")


def array_words(chars: Chars) -> Iterator[Chars]:
    """The words between the brackets of an array, which go over lines with comments between them."""
    for _, raw in simple_commands(chars, []):
        yield from raw


def simple_commands(chars: Chars, directives: list[tuple[Word, ...]]) -> Iterator[tuple[str, list[Chars]]]:
    """Each command as the operator before it and its words as they are written.

    A sum `((...))` is one word; `f() {` begins with the words `function f`, however it is written. The
    brackets of subshells, and texts that follow a line, are commands of their own.
    """
    closings = Closings(chars)
    at, before, raw = 0, "\n", list[Chars]()
    word: Chars = []
    size = len(chars)
    skips = False  # The next word is a file that output goes to.
    ends: list[_End] = []  # Of texts that follow the line.
    goes_to: Chars = []  # The file that output of the line goes to.
    sends = False  # The next word is that file.
    opened = 0  # Subshells.
    pattern = False  # What comes next chooses a branch of a `case`.

    def char(index: int) -> str:
        return chars[index][0] if index < size and not isinstance(chars[index][0], Unknown) else ""

    def take_word() -> None:
        """Put a word that has ended where it belongs."""
        nonlocal goes_to
        if word and ends and not ends[-1].word and skips:
            ends[-1] = _End.of(word)
        elif word and sends:
            goes_to = word
        elif word and not skips:
            raw.append(word)

    while at <= size:
        here = char(at)
        operator = next((one for one in _OPERATORS if here and _starts(chars, at, one)), "")
        blank = at == size or (here.isspace() and here != "\n")
        if here == "(" and word and plain(word[-1:]) == "=" and ASSIGNMENT.fullmatch(plain(word)):
            end = _array_end(chars, closings, at)
            word += chars[at:end]
            at = end
            continue
        if here == "(" and not word and _begins_command(raw) and (end := _sum_end(chars, at)) > at:
            raw.append(chars[at:end])
            at = end
            continue
        if here == "(" and (word or raw) and (end := _empty_brackets_end(chars, at)) > at:
            name = [*raw, word] if word else raw
            if plain(name[0]) == "function" or (len(name) == 1 and _NAME.fullmatch(plain(name[0]))):
                raw = name if len(name) > 1 else [[(char, chars[at][1]) for char in "function"], *name]
                yield before, raw
                before, raw, word, at = "\n", [], [], end
                continue
        if operator in _TEST_WORDS and raw and _tests([*raw, word]):
            raw += [part for part in (word, chars[at : at + len(operator)]) if part]
            word = []
            at += len(operator)
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
            continue
        if operator and not (operator == "&" and word[-1:] and word[-1][0] == ">"):
            if operator in (">", "<", ">>", "<<", "&>", ">&", "<&") and plain(word).isdigit():
                word = []  # The number of a stream.
            take_word()
            word, skips, sends = [], False, False
            if operator in (">", "<", ">>", "<<", "&>", ">&", "<&"):
                skips, sends = True, operator in (">", ">>", "&>")
                if operator == "<<" and char(at + 2) != "<":
                    ends.append(_End())
                at += len(operator) + (operator == "<<" and char(at + 2) == "<")
                continue
            closes = operator == ")" and opened > 0 and not pattern and not _chooses(raw)
            if operator == "(" and _begins_command(raw) and not pattern:
                if raw:
                    yield before, raw
                    before, raw = "\n", []
                yield before, [[("(", chars[at][1])]]
                opened, before, at = opened + 1, "\n", at + 1
                continue
            if raw:
                pattern = (pattern or _chooses(raw)) and operator != ")" and plain(raw[0]) != "esac"
                yield before, raw
                before, raw = operator, []
            elif operator != "\n" or before not in ("&&", "||", "|", ";;", ")"):
                before = operator
            if operator in (";;", ")"):
                pattern = operator == ";;"
            if closes:
                yield "\n", [[(")", chars[at][1])]]
                opened, before = opened - 1, "\n"
            at += len(operator)
            if operator == "\n" and ends:
                for last in ends:
                    start, at = at, _after_text(chars, at, last.word)
                    yield "\n", [[(mark, 0) for mark in TEXT], goes_to, last.quoted(chars[start:at])]
                ends = []
            if operator in ("\n", ";", "&&", "||", "&"):
                goes_to = []
            continue
        if blank:
            take_word()
            skips = skips and not word
            sends = sends and not word
            word = []
            at += 1
            continue
        end = closings.after(at) if closings.opens(at) else at + 1
        word += chars[at:end]
        at = end
    if raw:
        yield before, raw


def _begins_command(raw: list[Chars]) -> bool:
    return not raw or plain(raw[-1]) in KEYWORDS or [plain(word) for word in raw] == ["for"]


def _tests(raw: list[Chars]) -> bool:
    """Whether the words so far are an open `[[`."""
    words = [plain(word) for word in raw[-MOST_TEST_WORDS:]]
    return "[[" in words and "]]" not in words


def _sum_end(chars: Chars, at: int) -> int:
    """Index after `((...))`; `at` where that is none."""
    if plain(chars[at : at + 2]) != "((":
        return at
    opened = 0
    for end in range(at, min(at + LONGEST_SUM, len(chars))):
        char = chars[end][0]
        opened += (char == "(") - (char == ")")
        if not opened:
            return end + 1 if chars[end - 1][0] == ")" else at
        if char == "\n":
            return at
    return at


def _empty_brackets_end(chars: Chars, at: int) -> int:
    """Index after `()`; `at` where that is none."""
    end = at + 1
    while end < len(chars) and chars[end][0] in " \t":
        end += 1
    return end + 1 if end < len(chars) and chars[end][0] == ")" else at


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


@dataclass(frozen=True)
class _End:
    """The line that ends a text which follows a command (`<<END`)."""

    word: str = ""
    """Empty before it is read."""
    literal: bool = False
    """Nothing in the text is a variable."""

    @classmethod
    def of(cls, word: Chars) -> _End:
        """The end of a here-document, from the word behind `<<`."""
        text = plain(word)
        return cls(text.strip("-'\"\\"), any(mark in text for mark in "'\"\\"))

    def quoted(self, lines: Chars) -> Chars:
        """A text without its last line, in quotes."""
        end = len(lines) - (bool(lines) and lines[-1][0] == "\n")
        while end and lines[end - 1][0] != "\n":
            end -= 1
        quote = "'" if self.literal else '"'
        found: Chars = []
        for char, line in lines[:end]:
            if char == quote:
                found += [(mark, line) for mark in ("'\\'" if self.literal else "\\")]
            found.append((char, line))
        return [(quote, 0), *found, (quote, 0)]


def _chooses(raw: list[Chars]) -> bool:
    """Whether a command begins a `case`, whose next words are those of its branches."""
    words = [plain(word[:5]) for word in raw[:MOST_TEST_WORDS]]
    return "case" in words and "in" in words[words.index("case") :]


def _after_text(chars: Chars, at: int, end: str) -> int:
    """Index after the text that follows a line with `<<END`."""
    while at < len(chars):
        stop = at
        while stop < len(chars) and chars[stop][0] != "\n":
            stop += 1
        line = plain(chars[at:stop]).strip()
        at = stop + 1
        if line == end:
            break
    return min(at, len(chars))
