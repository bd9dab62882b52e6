"""Pickles that do harm to whoever loads them: they call what is installed, or take more than they are."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

CALLS = (
    *(("posix", "system"), ("os", "system"), ("os", "popen"), ("subprocess", "getoutput")),
    *(("timeit", "timeit"), ("builtins", "exec"), ("builtins", "eval"), ("cProfile", "run"), ("pdb", "run")),
    *(("torch.distributed.checkpoint.metadata", "os.system"), ("torch.serialization", "os.system")),
    *(("torch.distributed.checkpoint.filesystem", "os.system"), ("torch.utils.collect_env", "run")),
    *(("torch.hub", "os.system"), ("numpy.testing", "runstring"), ("runpy", "_run_code")),
)
"""Functions that run what they are given: a command of the shell, or Python for those of `PYTHON`."""

PYTHON = ("timeit", "exec", "eval", "run", "runstring", "_run_code")


class Call:
    """Is pickled as a call of a function, which loading it makes."""

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        self.module, self.name, self.arguments = module, name, arguments

    def __reduce__(self) -> Any:
        raise TypeError("only `dumped` pickles it")


class _Global:
    """A name that need not exist where it is pickled."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


_Base: Any = pickle._Pickler  # type: ignore[attr-defined]


class _Pickler(_Base):  # type: ignore[misc]
    """Writes calls of names that are not looked up."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Call):
            self.save_reduce(_Global(obj.module, obj.name), obj.arguments)
        elif isinstance(obj, _Global):
            if self.proto >= 4:
                self.save(obj.module)
                self.save(obj.name)
                self.write(pickle.STACK_GLOBAL)
            else:
                self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        else:
            super().save(obj, save_persistent_id)

    def save_reduce(self, func: Any, args: Any, *rest: Any, **more: Any) -> None:
        if isinstance(func, _Global):
            self.save(func)
            self.save(args)
            self.write(pickle.REDUCE)
        else:
            super().save_reduce(func, args, *rest, **more)


def dumped(value: Any, protocol: int = 4) -> bytes:
    """The pickle of a value with calls in it."""
    file = io.BytesIO()
    _Pickler(file, protocol).dump(value)
    return file.getvalue()


def call(module: str, name: str, canary: Path) -> Call:
    """One of `CALLS` that makes the canary."""
    shell = f"touch {canary}"
    python = f"__import__('os').system({shell!r})"
    if name == "_run_code":
        return Call(module, name, Call("builtins", "compile", python, "x", "exec"), {})
    return Call(module, name, python if name in PYTHON else shell)


def calling_pickles(canary: Path) -> Iterator[tuple[str, bytes]]:
    """Other ways in which a pickle can call something."""
    shell = f"touch {canary}"
    text = pickle.BINUNICODE + struct.pack("<I", len(shell)) + shell.encode()
    name = b"\x8c\x05posix\x8c\x06system\x93"
    yield "INST", b"(" + text + b"iposix\nsystem\n."
    yield "OBJ", b"(" + b"cposix\nsystem\n" + text + b"o."
    yield "NEWOBJ", b"\x80\x04" + name + text + b"\x85\x81."
    yield "NEWOBJ_EX", b"\x80\x04" + name + text + b"\x85}\x92."
    yield (
        "STACK_GLOBAL from the memo",
        b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94h\x00h\x01\x93" + text + b"\x85R.",
    )
    yield "a persistent id", b"\x80\x04" + text + b"Q."
    yield "an extension", b"\x80\x02\x82\x01" + text + b"\x85R."
    attribute = Call("builtins", "getattr", Call("builtins", "__import__", "os"), "system")
    for protocol in (2, 4):
        start = dumped(attribute, protocol)[:-1]
        yield f"getattr by protocol {protocol}", start + text + b"\x85R."
    inner = dumped(call("posix", "system", canary), 2)
    for module, function in (
        *(("pickle", "loads"), ("_pickle", "loads"), ("torch.storage", "_load_from_bytes")),
        *(("torch._utils", "_rebuild_device_tensor_from_numpy"), ("numpy.core.multiarray", "_reconstruct")),
        *(("_codecs", "encode"), ("codecs", "decode"), ("marshal", "loads")),
    ):
        yield f"{module}.{function}", dumped(Call(module, function, inner))
    state = {"__setstate__": call("posix", "system", canary), "__class__": Call("builtins", "type", "x")}
    yield "BUILD with a state of its own", dumped(Metadata({}))[:-1] + dumped(state)[11:-1] + b"b."
    partial_call = Call("functools", "partial", Call("builtins", "getattr", 0, "x"), shell)
    yield "functools.partial", dumped(Call("builtins", "map", partial_call, [1]))


def pickle_bombs(valid: bytes) -> Iterator[tuple[str, bytes]]:
    """Files that take more than they are."""
    yield "a memo of 2^31 entries", b"\x80\x04N" + b"r\xff\xff\xff\x7f" + b"."
    yield "a memo entry that is not there", b"\x80\x04j\xff\xff\xff\x7f."
    yield "bytes of 2^62", b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"."
    yield "a text of 2^32", b"\x80\x04X\xff\xff\xff\xff."
    yield "a number of 2^31 bytes", b"\x80\x04\x8b\xff\xff\xff\x7f."
    yield "tuples a million deep", b"\x80\x04)" + b"\x85" * 10**6 + b"."
    yield "tuples a million deep as a key", b"\x80\x04}(" + b")" + b"\x85" * 10**6 + b"Nu."
    yield "lists a million deep", b"\x80\x04" + b"]" * 10**6 + b"a" * (10**6 - 1) + b"."
    yield "a million marks", b"\x80\x04" + b"(" * 10**6 + b"t" * 10**6 + b"."
    yield "nothing", b""
    yield "a stop alone", b"\x80\x04."
    yield "takes from nothing", b"\x80\x04R."
    yield "half of it", valid[: len(valid) // 2]
    yield "twice", valid + valid
