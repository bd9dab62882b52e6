"""Values that a shell script sets: variables, arrays, arguments, and commands that only set these."""

from __future__ import annotations

import re
from collections.abc import Collection

from planner.formats.shell.commands import ASSIGNMENT, array_words
from planner.formats.shell.conditions import Truth
from planner.formats.shell.expansion import Expansion, Value, element_name
from planner.formats.shell.printing import formatted
from planner.formats.shell.text import Chars, Unknown, Word, plain, word_of

DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")


class Variables:
    """The variables of a script during reading."""

    def __init__(self, variables: dict[str, Value], fixed: Collection[str]) -> None:
        self.fixed = fixed
        """Names whose values come from outside, and stay."""
        self.variables = variables
        self.expansion = Expansion(variables, fixed)
        self.locals: list[dict[str, Value | None]] = []
        """Values outside a function of its own variables, for each function that is at work."""
        self.exported = set(fixed)
        """Names of variables that started programs see."""
        self._integers: set[str] = set()
        self.last_read = ""
        """The variable that the last `read` fills."""

    def texts(self, names: Collection[str]) -> dict[str, Word]:
        """The values of the named variables that are set to a text."""
        found = {name: self.variables[name] for name in names if name in self.variables}
        return {
            name: word_of([char for char in value if isinstance(char, tuple)])
            for name, value in found.items()
            if not (value and isinstance(value[0], list))
        }

    def compute(self, text: str, runs: Truth) -> int | None:
        def assign(name: str, value: int | None) -> None:
            known = value is not None and runs is True
            self.assign(name, [(char, 0) for char in str(value)] if known else unknown_value(name, 0))

        return self.expansion.number(text, assign)

    def sets(self, raw: list[Chars], runs: Truth) -> bool:
        """Carry out a command that only sets variables; return whether it was such a command."""
        first = plain(raw[0][:10])
        if first in DECLARATIONS:
            options = "".join(plain(word) for word in raw[1:] if plain(word[:1]) == "-")
            for word in raw[1:]:
                match = as_assignment(word)
                name = match[1] if match else plain(word)
                if self.locals and first != "export" and name.isidentifier():
                    self.locals[-1].setdefault(name, self.variables.get(name))
                if "i" in options and name.isidentifier():
                    self._integers.add(name)
                if first == "export" or "x" in options:
                    self.exported.add(name)
                self.assignment(word, runs)
        elif first in ("read", "unset", "mapfile", "readarray"):
            for word in raw[1:]:
                if plain(word).isidentifier():
                    self.last_read = plain(word) if first == "read" else ""
                    self.assign(plain(word), unknown_value(plain(word), word[0][1]))
        elif first == "printf" and len(raw) > 2 and plain(raw[1]) == "-v":
            name, *words = [part for word in raw[2:] for part in self.expansion.split(word)] or [[]]
            value = formatted(words[0], words[1:]) if words else None
            if plain(name).isidentifier():
                known = (
                    value
                    if value is not None and runs is not None
                    else unknown_value(plain(name), raw[0][0][1])
                )
                self.assign(plain(name), known)
        elif first == "let":
            for word in raw[1:]:
                self.compute(plain(self.expansion.value(word)), runs)
        elif first == "shift":
            count = int(plain(raw[1])) if len(raw) > 1 and re.fullmatch("[0-9]{1,3}", plain(raw[1])) else 1
            if runs and count <= len(self.arguments()):
                self.give_arguments(self.arguments()[count:])
        elif first == "set" and len(raw) > 1 and plain(raw[1]) == "--":
            self.give_arguments([part for word in raw[2:] for part in self.expansion.split(word)])
        else:
            return False
        return True

    def arguments(self) -> list[Chars]:
        """The arguments of the script, or of the function that is called."""
        return [part for part in self.variables.get("@", []) if isinstance(part, list)]

    def give_arguments(self, arguments: list[Chars]) -> None:
        for name in [name for name in self.variables if name.isdigit()]:
            del self.variables[name]
        self.variables["@"] = arguments
        self.variables.update({str(at): part for at, part in enumerate(arguments, 1)})

    def assignment(self, raw: Chars, runs: Truth) -> bool:
        """Carry out `NAME=value`; return whether the word was an assignment."""
        match = as_assignment(raw)
        if match is None:
            return False
        name, index, adds = match.groups()
        value = raw[match.end() :]
        line = raw[0][1]
        new: Value
        if value and value[0][0] == "(" and value[-1][0] == ")":
            new = self._array(name, value[1:-1], runs)
        else:
            new = self.expansion.value(value)
        if index is not None:
            self._assign_element(name, index, unknown_value(name, line) if runs is None else new, line)
            return True
        old = self.variables.get(name)
        if name in self._integers:
            new = self._whole(name, f"{name}+({plain(self._text(new))})" if adds else plain(self._text(new)))
        elif adds and old is not None:
            new = _joined(old, new)
        if runs is None and old != new:
            new = unknown_value(name, line)
        self.assign(name, new)
        return True

    def _whole(self, name: str, text: str) -> Chars:
        """The value of a variable with `declare -i`; its text is an arithmetic expression."""
        value = self.expansion.number(text or "0")
        return unknown_value(name, 0) if value is None else [(char, 0) for char in str(value)]

    @staticmethod
    def _text(value: Value) -> Chars:
        return [char for char in value if isinstance(char, tuple)]

    def _array(self, name: str, inner: Chars, runs: Truth) -> list[Chars]:
        """The elements of an array; named elements are also stored under their names."""
        found: list[Chars] = []
        for word in array_words(inner):
            named = re.match(r"\[([^]]{1,80})\]=", plain(word[:100]))
            if named is None:
                found += self.expansion.split(word)
                continue
            value = self.expansion.value(word[named.end() :]) if runs else unknown_value(name, word[0][1])
            self.assign(element_name(name, self._key(named[1])), value)
            found.append(value)
        return found

    def _key(self, index: str) -> str:
        return plain(self.expansion.value([(char, 0) for char in index]))

    def _assign_element(self, name: str, index: str, value: Value, line: int) -> None:
        """Carry out `NAME[index]=value`."""
        key, old = self._key(index), self.variables.get(name)
        at = self.expansion.number(key)
        elements = [part for part in old or [] if isinstance(part, list)]
        is_list = len(elements) == len(old or []) and at is not None
        text = [char for char in value if isinstance(char, tuple)]
        if is_list and at is not None and 0 <= at <= len(elements):
            self.assign(name, [*elements[:at], text, *elements[at + 1 :]])
            return
        self.assign(element_name(name, key), value)
        if old is not None:
            self.assign(name, unknown_value(name, line))

    def assign(self, name: str, value: Value) -> None:
        if name not in self.fixed:
            self.variables[name] = value


def as_assignment(raw: Chars) -> re.Match[str] | None:
    return ASSIGNMENT.match(plain(raw[:300]))


def unknown_value(name: str, line: int) -> Chars:
    return [(Unknown(name), line)]


def _joined(old: Value, new: Value) -> Value:
    if (old and isinstance(old[0], list)) or (new and isinstance(new[0], list)):
        return [[part] if isinstance(part, tuple) else part for part in (*old, *new)]
    return [char for value in (old, new) for char in value if isinstance(char, tuple)]
