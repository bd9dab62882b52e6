"""The unexpanded commands of a shell script: words, and the operators between them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from costmodels.dataclass import dataclass
from planner.formats.shell.text import Char, Chars, Closings, Unknown, Word, plain, split_words, word_of

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[((?:[^][]|\[[^][]*\])*)\])?(\+?)=")
KEYWORDS = ("if", "elif", "then", "else", "fi", "do", "done", "while", "until", "esac", "{", "}", "!")
"""Keywords after which a command begins."""

_OPERATORS = ("&&", "||", ";;", "&>", ">>", "<<", "|&", ">&", "<&", ";", "&", "|", "\n", "(", ")", ">", "<")
SUBSHELL, SUBSHELL_END, TEXT = "(", ")", "<<"
"""First words of pseudo-commands for the begin and the end of a subshell, and for a here-document. The latter
has two more words: the target file, or nothing, and the text in quotes."""

_TEST_WORDS = ("&&", "||", "(", ")", "<", ">")
"""Operators that are words between `[[` and `]]`."""
MOST_TEST_WORDS = 60
LONGEST_SUM = 1000
"""Most characters of `((...))`."""

_NAME = re.compile(r"[A-Za-z_][\w.:-]*")
_DIRECTIVE = re.compile(r"#(SBATCH|BSUB|PBS|SLURM)\s")


def array_words(chars: Chars) -> Iterator[Chars]:
    """The words between the brackets of an array, over several lines, without comments."""
    for _, raw in simple_commands(chars, []):
        yield from raw


def simple_commands(chars: Chars, directives: list[tuple[Word, ...]]) -> Iterator[tuple[str, list[Chars]]]:
    """Each command as the operator before it and its unexpanded words.

    A sum `((...))` is one word. A function definition begins with the words `function f`, in any spelling.
    Brackets of subshells and here-documents are separate commands.
    """
    yield from _Reader(chars, directives).commands()


_REDIRECTIONS = (">", "<", ">>", "<<", "&>", ">&", "<&")

Found = tuple[str, list[Chars]]
"""The operator before a command, and the words of the command."""


class _Reader:
    """A position in a script, and the parts of the current command read so far."""

    def __init__(self, chars: Chars, directives: list[tuple[Word, ...]]) -> None:
        self.chars = chars
        self.directives = directives
        self.closings = Closings(chars)
        self.at = 0
        self.before = "\n"
        self.raw: list[Chars] = []
        self.word: Chars = []
        self.skips = False
        """The next word is a file that output goes to, or input comes from."""
        self.sends = False
        """The next word is the file that output of the line goes to."""
        self.goes_to: Chars = []
        """The file that output of the line goes to."""
        self.ends: list[_End] = []
        """Ends of the texts that follow the line."""
        self.opened = 0
        """Subshells that are open."""
        self.pattern = False
        """The next words choose a branch of a `case`."""

    def commands(self) -> Iterator[Found]:
        """All commands, to the end of the script."""
        while self.at <= len(self.chars):
            here = self.char(self.at)
            operator = next((one for one in _OPERATORS if here and _starts(self.chars, self.at, one)), "")
            if here == "(" and self._takes_brackets():
                continue
            if here == "(" and self._names_function():
                yield self.before, self.raw
                self.before, self.raw = "\n", []
            elif operator in _TEST_WORDS and self.raw and _tests([*self.raw, self.word]):
                self.raw += [part for part in (self.word, self._slice(len(operator))) if part]
                self.word = []
                self.at += len(operator)
            elif here == "<" and (placeholder := _placeholder(self.chars, self.at)):
                self.word.append((Unknown(placeholder), self.chars[self.at][1]))
                self.at += len(placeholder) + 2
            elif here == "#" and not self.word:
                self._skip_comment()
            elif here == "\\" and self.char(self.at + 1) == "\n":
                self.at += 2
            elif operator and not (operator == "&" and self.word[-1:] and self.word[-1][0] == ">"):
                yield from self._take_operator(operator)
            elif self.at == len(self.chars) or here.isspace():
                self._end_at_blank()
            else:
                self._take_until(
                    self.closings.after(self.at) if self.closings.opens(self.at) else self.at + 1
                )
        if self.raw:
            yield self.before, self.raw

    def char(self, index: int) -> str:
        """The character at a position; empty at the end, and for an unknown character."""
        known = index < len(self.chars) and not isinstance(self.chars[index][0], Unknown)
        return self.chars[index][0] if known else ""

    def _slice(self, size: int) -> Chars:
        return self.chars[self.at : self.at + size]

    def _take_until(self, end: int) -> None:
        """Add the characters before `end` to the word."""
        self.word += self.chars[self.at : end]
        self.at = end

    def _takes_brackets(self) -> bool:
        """Return whether the bracket here begins an array or a sum; if so, read it whole."""
        if self.word and plain(self.word[-1:]) == "=" and ASSIGNMENT.fullmatch(plain(self.word)):
            self._take_until(_array_end(self.chars, self.closings, self.at))
            return True
        if self.word or not _begins_command(self.raw) or (end := _sum_end(self.chars, self.at)) <= self.at:
            return False
        self.raw.append(self.chars[self.at : end])
        self.at = end
        return True

    def _names_function(self) -> bool:
        """Return whether the bracket here belongs to `f()`; if so, the name becomes the command."""
        if not (self.word or self.raw) or (end := _empty_brackets_end(self.chars, self.at)) <= self.at:
            return False
        name = [*self.raw, self.word] if self.word else self.raw
        if plain(name[0]) != "function" and not (len(name) == 1 and _NAME.fullmatch(plain(name[0]))):
            return False
        line = self.chars[self.at][1]
        self.raw = name if len(name) > 1 else [[(char, line) for char in "function"], *name]
        self.word, self.at = [], end
        return True

    def _skip_comment(self) -> None:
        """Go to the end of the line; a directive of a scheduler is kept."""
        end = self.at
        while end < len(self.chars) and self.char(end) != "\n":
            end += 1
        if _DIRECTIVE.match(plain(self.chars[self.at : end])):
            self.directives.append(tuple(map(word_of, split_words(self.chars[self.at + 1 : end]))))
        self.at = end

    def _take_word(self) -> None:
        """Store a finished word in its place."""
        if self.word and self.ends and not self.ends[-1].word and self.skips:
            self.ends[-1] = _End.of(self.word)
        elif self.word and self.sends:
            self.goes_to = self.word
        elif self.word and not self.skips:
            self.raw.append(self.word)

    def _end_at_blank(self) -> None:
        self._take_word()
        self.skips = self.skips and not self.word
        self.sends = self.sends and not self.word
        self.word = []
        self.at += 1

    def _take_operator(self, operator: str) -> Iterator[Found]:
        """End the word at an operator, and the command at an operator between commands."""
        if operator in _REDIRECTIONS and plain(self.word).isdigit():
            self.word = []  # The number of a stream.
        self._take_word()
        self.word, self.skips, self.sends = [], False, False
        if operator in _REDIRECTIONS:
            self._redirect(operator)
        elif operator == "(" and _begins_command(self.raw) and not self.pattern:
            yield from self._open_subshell()
        else:
            yield from self._end_command(operator)

    def _redirect(self, operator: str) -> None:
        """Mark the next word as a file name, or as the end marker of a here-document."""
        self.skips, self.sends = True, operator in (">", ">>", "&>")
        is_text = operator == "<<" and self.char(self.at + 2) != "<"
        if is_text:
            self.ends.append(_End())
        self.at += len(operator) + (operator == "<<" and not is_text)

    def _open_subshell(self) -> Iterator[Found]:
        if self.raw:
            yield self.before, self.raw
            self.before, self.raw = "\n", []
        yield self.before, [[("(", self.chars[self.at][1])]]
        self.opened, self.before, self.at = self.opened + 1, "\n", self.at + 1

    def _end_command(self, operator: str) -> Iterator[Found]:
        """Yield the command before an operator, the end of its subshell, and here-documents after the
        line."""
        closes = operator == ")" and self.opened > 0 and not self.pattern and not _chooses(self.raw)
        if self.raw:
            chooses = self.pattern or _chooses(self.raw)
            self.pattern = chooses and operator != ")" and plain(self.raw[0]) != "esac"
            yield self.before, self.raw
            self.before, self.raw = operator, []
        elif operator != "\n" or self.before not in ("&&", "||", "|", ";;", ")"):
            self.before = operator
        if operator in (";;", ")"):
            self.pattern = operator == ";;"
        if closes:
            yield "\n", [[(")", self.chars[self.at][1])]]
            self.opened, self.before = self.opened - 1, "\n"
        self.at += len(operator)
        if operator == "\n":
            yield from self._texts()
        if operator in ("\n", ";", "&&", "||", "&"):
            self.goes_to = []

    def _texts(self) -> Iterator[Found]:
        """The here-documents after a finished line."""
        for last in self.ends:
            start, self.at = self.at, _after_text(self.chars, self.at, last.word)
            yield "\n", [[(mark, 0) for mark in TEXT], self.goes_to, last.quoted(self.chars[start : self.at])]
        self.ends = []


def _begins_command(raw: list[Chars]) -> bool:
    return not raw or plain(raw[-1]) in KEYWORDS or [plain(word) for word in raw] == ["for"]


def _tests(raw: list[Chars]) -> bool:
    """Return whether the words so far begin a test with `[[` that is not closed."""
    words = [plain(word) for word in raw[-MOST_TEST_WORDS:]]
    return "[[" in words and "]]" not in words


def _sum_end(chars: Chars, at: int) -> int:
    """Index after `((...))`; `at` where there is none."""
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
    """Index after `()`; `at` where there is none."""
    end = at + 1
    while end < len(chars) and chars[end][0] in " \t":
        end += 1
    return end + 1 if end < len(chars) and chars[end][0] == ")" else at


_PLACEHOLDER = re.compile(r"<([A-Za-z][\w ./:-]{0,80}[\w./])>")


def _placeholder(chars: Chars, at: int) -> str:
    """The text of a placeholder such as `<PATH TO DATA>`, which users fill in; empty for a redirection."""
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
    """The end marker of a here-document (`<<END`)."""

    word: str = ""
    """The marker word; empty before it is read."""
    literal: bool = False
    """True if the text is literal, without variables."""

    @classmethod
    def of(cls, word: Chars) -> _End:
        """The end of a here-document, from the word behind `<<`."""
        text = plain(word)
        return cls(text.strip("-'\"\\"), any(mark in text for mark in "'\"\\"))

    def quoted(self, lines: Chars) -> Chars:
        """The text of a here-document, without its last line, in quotes."""
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
    """Return whether a command begins a `case`, so that the next words are its patterns."""
    words = [plain(word[:5]) for word in raw[:MOST_TEST_WORDS]]
    return "case" in words and "in" in words[words.index("case") :]


def _after_text(chars: Chars, at: int, end: str) -> int:
    """Index after the here-document of a line with `<<END`."""
    while at < len(chars):
        stop = at
        while stop < len(chars) and chars[stop][0] != "\n":
            stop += 1
        line = plain(chars[at:stop]).strip()
        at = stop + 1
        if line == end:
            break
    return min(at, len(chars))
