"""The `.metadata` file of torch.distributed.checkpoint, read without running code.

PyTorch writes it as a pickle, and loading a pickle may call any function. So the pickle is not loaded: its
few opcodes are read as data, names of classes stay names, and only PyTorch's form is accepted.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from costmodels.errors import InputError
from costmodels.files import read_at_most

METADATA = ".metadata"
"""The file that lists the tensors of a checkpoint, and the place of each in the other files."""

LARGEST_METADATA = 1 << 30
"""Most bytes of the file; enough for some million pieces of tensors."""

MOST_DIMENSIONS = 16
MOST_ELEMENTS = 1 << 60

_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_OF_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
KNOWN_CLASSES = frozenset(
    {(_OF_METADATA, name) for name in _CLASSES}
    | {("torch", name) for name in _DTYPES}
    | {("torch", "Size"), ("torch.serialization", "_get_layout"), (_FILESYSTEM, "_StorageInfo")}
    # Python 3.11.0 to 3.11.3 write members of enumerations as calls of it.
    | {("builtins", "getattr")}
    # The folder that was written to, which nobody needs.
    | {(module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")}
)
"""Allowed modules and names. None of them is called."""

_FILE = re.compile(r"\w[\w.-]*", re.ASCII)


class Place(NamedTuple):
    """The file that holds a piece of a tensor, with offset and length in bytes."""

    file: str
    """The file's name in the checkpoint's folder."""
    offset: int
    length: int


class _Malformed(Exception):
    """Error: PyTorch did not write this pickle."""


class _Name:
    """The names of a module and of an object in it; the object is not looked up."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def is_of(self, name: str, module: str = _OF_METADATA) -> bool:
        return self.name == name and self.module == module


class _Object:
    """A pickled call that is not made: its class or function, its `arguments`, and the state of its
    result."""

    __slots__ = ("arguments", "of", "state")

    def __init__(self, of: _Name, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments = of, arguments
        self.state: Any = None


class _Pairs(list[Any]):
    """A dictionary as a list of alternating keys and values; keys are not hashed before their type is
    checked."""


def read_metadata(folder: Path) -> Metadata:
    """The tensors of the checkpoint in `folder`, and the places of their pieces.

    Raises:
        InputError: there is no `.metadata`, or it has other contents than places of tensors.
    """
    path = folder / METADATA
    try:
        data = read_at_most(path, LARGEST_METADATA)
    except OSError as error:
        raise InputError(
            f"checkpoint {folder}: {METADATA} cannot be read ({error.strerror}); give the folder of a whole "
            "checkpoint"
        ) from None
    try:
        return _metadata(_Parser(data).parse())
    except _Malformed as error:
        raise InputError(
            f"{path}: not what PyTorch writes: {error}; nothing of it is used: take a checkpoint "
            "from a source that you trust"
        ) from None


class _Parser:
    """A reader of the opcodes in PyTorch's file (protocols 4 and 5); it refuses all others."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def parse(self) -> Any:
        """The object that the file describes."""
        handlers: list[Callable[[], None] | None] = [None] * 256
        for letter, handler in self._handlers().items():
            handlers[ord(letter)] = handler
        data, stop = self.data, ord(".")
        try:
            while (code := data[self.at]) != stop:
                self.at += 1
                handle = handlers[code]
                if handle is None:
                    raise _Malformed(f"byte {self.at - 1} is {bytes((code,))!r}")
                handle()
            if len(self.stack) != 1 or self.marks or self.at != len(data) - 1:
                raise _Malformed("it does not end where it should")
        except (IndexError, struct.error, UnicodeDecodeError):
            raise _Malformed("it is cut off or garbled") from None
        return self.stack[0]

    def _handlers(self) -> dict[str, Callable[[], None]]:
        push = self._pushed
        return {
            "\x80": self._protocol,
            "\x95": self._frame,
            "\x94": self._memoize,
            "h": lambda: self._get("<B"),
            "j": lambda: self._get("<I"),
            "K": lambda: push(self._number("<B")),
            "M": lambda: push(self._number("<H")),
            "J": lambda: push(self._number("<i")),
            "\x8a": lambda: push(self._long()),
            "\x8c": lambda: push(self._text("<B")),
            "X": lambda: push(self._text("<I")),
            "N": lambda: push(None),
            "\x88": lambda: push(True),
            "\x89": lambda: push(False),
            ")": lambda: push(()),
            "]": lambda: push([]),
            "}": lambda: push(_Pairs()),
            "(": lambda: self.marks.append(len(self.stack)),
            "\x85": lambda: self._tuple(1),
            "\x86": lambda: self._tuple(2),
            "\x87": lambda: self._tuple(3),
            "t": lambda: push(tuple(self._marked())),
            "a": lambda: self._add(list, self._popped(1)),
            "e": lambda: self._add(list, self._marked()),
            "s": lambda: self._add(_Pairs, self._popped(2)),
            "u": lambda: self._add(_Pairs, self._marked()),
            "\x93": self._name,
            "R": self._make,
            "\x81": self._make,
            "b": self._build,
        }

    def _pushed(self, value: Any) -> None:
        self.stack.append(value)

    def _popped(self, count: int) -> list[Any]:
        least = self.marks[-1] if self.marks else 0
        if len(self.stack) - count < least:
            raise _Malformed("it takes what is not there")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _marked(self) -> list[Any]:
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return int(value)

    def _taken(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) != count:
            raise _Malformed("it is cut off")
        self.at += count
        return part

    def _long(self) -> int:
        return int.from_bytes(self._taken(self._number("<B")), "little", signed=True)

    def _text(self, form: str) -> str:
        return self._taken(self._number(form)).decode()

    def _protocol(self) -> None:
        number = self._number("<B")
        if number not in (4, 5):
            raise _Malformed(f"protocol {number}")

    def _frame(self) -> None:
        self._number("<Q")

    def _memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def _get(self, form: str) -> None:
        self.stack.append(self.memo[self._number(form)])

    def _tuple(self, count: int) -> None:
        self.stack.append(tuple(self._popped(count)))

    def _add(self, kind: type[list[Any]], values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not kind:
            raise _Malformed("it adds to what is no list or dictionary")
        target += values

    def _name(self) -> None:
        module, name = self._popped(2)
        if type(module) is not str or type(name) is not str:
            raise _Malformed("a name is no text")
        if (module, name) not in KNOWN_CLASSES:
            raise _Malformed(f"it names {f'{module}.{name}'[:80]!r}")
        self.stack.append(_Name(module, name))

    def _make(self) -> None:
        of, arguments = self._popped(2)
        if type(of) is not _Name or type(arguments) is not tuple:
            raise _Malformed("it makes an object of something that is no class")
        self.stack.append(_Object(of, arguments))

    def _build(self) -> None:
        target, state = self._popped(2)
        if type(target) is not _Object or target.state is not None:
            raise _Malformed("it gives a state to what has none")
        target.state = state
        self.stack.append(target)


def _metadata(found: Any) -> Metadata:
    """Metadata in PyTorch's own classes, from a pickle's objects, with each field checked."""
    fields = _fields(found, "Metadata")
    places = dict(_place(key, value) for key, value in _pairs(fields.get("storage_data")))
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for key, value in _pairs(fields.get("state_dict_metadata")):
        # One after the other: a file may name the pieces of one tensor for ever so many more.
        name, stored = _text(key), _tensor(value)
        if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
            raise _Malformed(f"the pieces of {name!r} do not make it up")
        for chunk in stored.chunks:
            if MetadataIndex(name, chunk.offsets) not in places:
                raise _Malformed(f"a piece of {name!r} lies nowhere")
        tensors[name] = stored
    return Metadata(tensors, storage_data=places)


def _fields(found: Any, name: str, module: str = _OF_METADATA) -> dict[str, Any]:
    """The fields of an object, which must be of the expected class."""
    if type(found) is not _Object or found.arguments or not found.of.is_of(name, module):
        of = f"{found.of.module}.{found.of.name}" if type(found) is _Object else type(found).__name__
        raise _Malformed(f"{of[:80]!r} where a {name} belongs")
    return {_text(key): value for key, value in _pairs(found.state)}


def _pairs(found: Any) -> Iterator[tuple[Any, Any]]:
    if type(found) is not _Pairs or len(found) % 2:
        raise _Malformed("something else where a dictionary belongs")
    return zip(found[::2], found[1::2], strict=True)


def _text(found: Any) -> str:
    if type(found) is not str:
        raise _Malformed("something else where a text belongs")
    return found


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found <= MOST_ELEMENTS:
        raise _Malformed("something else where a size belongs")
    return found


def _size(found: Any) -> torch.Size:
    if type(found) is not _Object or not found.of.is_of("Size", "torch") or found.state is not None:
        raise _Malformed("something else where a shape belongs")
    if len(found.arguments) != 1 or type(found.arguments[0]) is not tuple:
        raise _Malformed("something else where a shape belongs")
    if len(found.arguments[0]) > MOST_DIMENSIONS:
        raise _Malformed(f"a shape of {len(found.arguments[0])} dimensions")
    size = torch.Size(map(_count, found.arguments[0]))
    if math.prod(size) > MOST_ELEMENTS:
        raise _Malformed(f"a tensor of {math.prod(size)} elements")
    return size


def _tensor(found: Any) -> TensorStorageMetadata:
    fields = _fields(found, "TensorStorageMetadata")
    properties = fields.get("properties")
    state = properties.state if type(properties) is _Object else None
    if type(properties) is not _Object or not properties.of.is_of("TensorProperties"):
        raise _Malformed("something else where a number format belongs")
    # The others say how memory was laid out, which PyTorch heeds no more.
    dtype = state[0] if type(state) is tuple and state else None
    if type(dtype) is not _Name or dtype.module != "torch" or dtype.name not in _DTYPES:
        raise _Malformed("something else where a number format belongs")
    size, chunks = _size(fields.get("size")), fields.get("chunks")
    if type(chunks) is not list:
        raise _Malformed("something else where pieces belong")
    return TensorStorageMetadata(
        TensorProperties(dtype=_DTYPES[dtype.name]), size, [_chunk(chunk, size) for chunk in chunks]
    )


def _chunk(found: Any, whole: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(found, "ChunkStorageMetadata")
    offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
    if not len(offsets) == len(sizes) == len(whole) or any(
        offset + size > length for offset, size, length in zip(offsets, sizes, whole, strict=True)
    ):
        raise _Malformed("a piece lies outside its tensor")
    return ChunkStorageMetadata(offsets, sizes)


def _place(key: Any, value: Any) -> tuple[MetadataIndex, Place]:
    index = _fields(key, "MetadataIndex")
    where = _fields(value, "_StorageInfo", _FILESYSTEM)
    offset = index.get("offset")
    file = _text(where.get("relative_path"))
    if not _FILE.fullmatch(file):
        raise _Malformed(f"{file[:80]!r} is no file of this folder")
    if where.get("transform_descriptors") is not None:
        raise _Malformed("tensors are compressed or encrypted")
    return (
        MetadataIndex(_text(index.get("fqn")), None if offset is None else _size(offset)),
        Place(file, _count(where.get("offset")), _count(where.get("length"))),
    )
