"""Command-line flags from dataclasses: one field, one flag, whose help is the field's own.

The command lines of `planner` and `runtime.pretrain` are made this way, so each flag is described once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import os
import sys
import typing
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from costmodels.errors import InputError, on_one_line
from planner.options.limits import Bounds, check_bounds
from planner.options.messages import command_message, message_spelling, spelling


def flag(
    default: Any,
    help: str,
    *names: str,
    metavar: str | None = None,
    hidden: bool = False,
    degree: str | None = None,
    values: Callable[[], Iterable[str]] | None = None,
    within: Bounds | None = None,
) -> Any:
    """A dataclass field that becomes a flag: `names`, or `--field-name` when none is given.

    A `hidden` one is accepted and left out of the help. `degree` is the field of `Layout` that the flag sets,
    where it has another name. `values` are offered by shell completion. A number must lie `within` its bounds
    in every command; a number without bounds is checked where it is used.
    """
    metadata = {
        "help": help,
        "names": names,
        "metavar": metavar,
        "hidden": hidden,
        "degree": degree,
        "values": values,
        "within": within,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def argument(help: str, metavar: str) -> Any:
    """A dataclass field that takes a command's words that belong to no flag; at least one word is needed."""
    return dataclasses.field(metadata={"help": help, "metavar": metavar, "positional": True})


def flag_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The spellings under which a field is given on the command line."""
    return tuple(field.metadata.get("names", ())) or ("--" + field.name.replace("_", "-"),)


def _number(kind: type[int] | type[float], what: str) -> Callable[[str], int | float]:
    def number(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {what}") from None

    number.__name__ = kind.__name__  # Shown in the help.
    return number


_PARSERS = {int: _number(int, "a whole number"), float: _number(float, "a number")}
"""Conversions of flag values by type; unlike Typer's, their errors name the refused value."""


def _parser(hint: Any) -> Callable[[str], int | float] | None:
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind in _PARSERS]
    return _PARSERS[kinds[0]] if kinds and typing.get_origin(hint) is not list else None


def _completion(values: Callable[[], Iterable[str]] | None) -> Callable[[str], list[str]] | None:
    if values is None:
        return None

    def complete(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return complete


def sections_of(group: type) -> dict[str, str]:
    """The help heading of each field of a group of flags.

    `SECTIONS` of the group and of its bases gives the heading of each run of fields, by the first field.
    """
    starts: dict[str, str] = {}
    for base in group.__mro__:
        starts = {**getattr(base, "SECTIONS", {}), **starts}
    found, section = {}, None
    for field in dataclasses.fields(group):
        section = starts.get(field.name, section)
        if section is not None:
            found[field.name] = section
    return found


def _parameters(group: type, named: Container[str] | None) -> list[inspect.Parameter]:
    fields = [
        field
        for field in dataclasses.fields(group)
        if named is None or field.metadata.get("positional") or any(name in named for name in _names(field))
    ]
    if not fields:
        return []
    hints, sections = typing.get_type_hints(group), sections_of(group)
    parameters = []
    for field in fields:
        if field.metadata.get("positional"):
            words = typer.Argument(help=field.metadata["help"], metavar=field.metadata["metavar"])
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=Annotated[hints[field.name], words],
                )
            )
            continue
        option = typer.Option(
            *flag_names(field),
            help=field.metadata.get("help"),
            metavar=field.metadata.get("metavar"),
            hidden=field.metadata.get("hidden", False),
            rich_help_panel=sections.get(field.name),
            autocompletion=_completion(field.metadata.get("values")),
            parser=_parser(hints[field.name]),
            show_default=field.default not in (None, False, dataclasses.MISSING),
        )
        default = (
            field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        )
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[hints[field.name], option],
            )
        )
    return parameters


def hidden_flags(*groups: type, but: type | tuple[type, ...]) -> type:
    """A dataclass of the flags of `groups`, hidden and None unless given; flags that `but` has too are left
    out.

    A command that takes it accepts the flags of other commands; `arguments` of an instance names them.
    """
    kept = but if isinstance(but, tuple) else (but,)
    own = {field.name for group in kept for field in dataclasses.fields(group)}
    return dataclasses.make_dataclass(
        "Ignored",
        [
            (field.name, typing.get_type_hints(group)[field.name] | None, _unset(field))
            for group in groups
            for field in dataclasses.fields(group)
            if field.name not in own
        ],
        frozen=True,
    )


def _unset(field: dataclasses.Field[Any]) -> Any:
    within = field.metadata.get("within")
    return flag(None, field.metadata.get("help", ""), *flag_names(field), hidden=True, within=within)


def groups_of(record: Any, but: Container[str] = ()) -> dict[str, Any]:
    """The groups of flags that are the fields of a record, by name, except those in `but`."""
    return {one.name: one.default_factory for one in dataclasses.fields(record) if one.name not in but}


Late = Callable[[], type]
"""A function that makes the dataclass of a group of hidden flags; most runs do not need it."""


def flag_groups(
    late: Mapping[str, Late] = MappingProxyType({}), notes: tuple[str, ...] = (), **groups: type
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of `groups` (dataclasses); it is called with one instance of each.

    Groups that have a `help_note` add it to the end of the command's help, after `notes`. A command with
    `late` groups goes through `for_words`. It gets None for a late group unless the words name a flag of that
    group. If the words name only the command's own flags, only those flags are declared. Declaring a hundred
    flags takes about 20 ms.

    Examples:
        >>> @flag_groups(model=ModelOptions, data=DataOptions)  # doctest: +SKIP
        ... def command(model: ModelOptions, data: DataOptions) -> None: ...
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        if not late:
            return _command(function, groups, {}, notes)

        def for_words(words: Iterable[str]) -> Callable[..., None]:
            flags = [word.partition("=")[0] for word in words if word.startswith("-")]
            named = {flag for flag in flags if flag.startswith("--")}
            if named <= {name for group in groups.values() for name in _spellings(group)}:
                # With one dash help is asked for, or something is wrong: then all flags count.
                few = named if len(named) == len(set(flags)) else None
                return _command(function, groups, dict.fromkeys(late), notes, few)
            return _command(function, groups | {name: make() for name, make in late.items()}, {}, notes)

        function.for_words = for_words  # type: ignore[attr-defined]
        return function

    return decorate


def for_words(command: Callable[..., None], words: Iterable[str]) -> Callable[..., None]:
    """A command that declares only those of its flags that `words` name."""
    found: Callable[..., None] = command.for_words(words) if hasattr(command, "for_words") else command
    return found


def _spellings(group: type) -> Iterator[str]:
    for field in dataclasses.fields(group):
        yield from _names(field)


def _names(field: dataclasses.Field[Any]) -> Iterator[str]:
    """All spellings of a flag, including those that turn it off."""
    for name in flag_names(field):
        yield from name.split("/")


def _command(
    function: Callable[..., None],
    groups: Mapping[str, type],
    others: Mapping[str, None],
    notes: tuple[str, ...],
    named: Container[str] | None = None,
) -> Callable[..., None]:
    """`function` with the flags of `groups` as its parameters; `others` are passed on unchanged.

    Args:
        named: spellings of the flags to declare, all unless given; flags that are not declared have their
            defaults.
    """

    def command(**values: Any) -> None:
        fields = [field for group in groups.values() for field in dataclasses.fields(group)]
        names = [(field.name, flag_names(field), field.metadata.get("degree")) for field in fields]
        with message_spelling(spelling(names, sys.argv[1:])):
            try:
                given = {
                    name: group(
                        **{
                            field.name: values[field.name]
                            for field in dataclasses.fields(group)
                            if field.name in values
                        }
                    )
                    for name, group in groups.items()
                }
                for group in given.values():
                    check_bounds(group)
                function(**given, **others)
            except InputError as error:
                raise type(error)(command_message(str(error))) from None

    command.__name__ = function.__name__
    command.__doc__ = inspect.cleandoc(function.__doc__ or "")
    said = [*notes, *(group.help_note() for group in groups.values() if hasattr(group, "help_note"))]
    command.epilog = "\n\n".join(said)  # type: ignore[attr-defined]
    signature = [parameter for group in groups.values() for parameter in _parameters(group, named)]
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    return command


def arguments(group: Any) -> list[str]:
    """The command-line arguments that give `group` (an instance) its values; defaults are left out."""
    words = []
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        name = flag_names(field)[0]
        default = (
            field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        )
        if value == default:
            continue
        if isinstance(value, bool):
            words.append(name)
        elif isinstance(value, tuple):
            words += [name, *map(str, value)]
        else:
            for item in value if isinstance(value, list) else [value]:
                words += [name, str(item)]
    return words


def one_line(error: Exception) -> str:
    """The message of an error on a single line, with names spelled as on the command line."""
    words = error if isinstance(error, ValidationError) else InputError(command_message(str(error)))
    return on_one_line(words)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error codes of a stream that accepts no more output."""


REFUSED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT),
    *(errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE),
)
"""Error codes with which a system refuses to open or to write a file."""


def _drop_output() -> None:
    """Discard buffered standard output, which could not be written at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def while_read() -> Iterator[None]:
    """Exit with code 141 and no message if the reader of standard output goes away, as `run` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        sys.exit(141)


def run(app: typer.Typer, name: str, quiet: bool = False) -> None:
    """Run a typer app and exit: wrong input ends in one line on stderr, never a traceback.

    With `quiet` the exit code is the same, and another process prints the line.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name=name, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.Exit as stop:
        code = stop.exit_code
    except typer.Abort:
        code = 130
    except KeyboardInterrupt:
        code = 130
    except (InputError, ValidationError) as error:
        if not quiet:
            print(f"{name}: error: {one_line(error)}", file=sys.stderr)
        code = getattr(error, "exit_code", 2)
    except BrokenPipeError:
        _drop_output()
        code = 141
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        # Click has made it that.
        _drop_output()
        code = 141
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        if error.filename is not None and error.errno not in REFUSED:
            raise
        if error.filename is None:
            _drop_output()
        what = "standard output cannot be written" if error.filename is None else f"{error.filename}"
        print(f"{name}: error: {on_one_line(InputError(f'{what}: {error.strerror}'))}", file=sys.stderr)
        code = 1 if error.filename is None else InputError.exit_code
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
        elif not quiet:
            line = " ".join(error.format_message().split())
            if "unexpected extra argument" in line:
                line += "; a flag takes one word: put commas, no blanks, between several names"
            print(f"{name}: error: {line}", file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
