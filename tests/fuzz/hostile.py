"""Files that somebody made to harm whoever reads them: none may run anything, and each ends in one line.

Every command that is hidden in them makes a file, the canary, so that it shows when one is run. Checksums are
right throughout: whoever writes a checkpoint writes its manifest too.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from costmodels import ModelSpec
from planner.plan import Plan
from runtime import checkpoint
from runtime.checkpoint.manifest import manifest_text, record_of
from runtime.checkpoint.tensor_store import Piece, Whole, write_tensors
from runtime.data.indexed_dataset import HEADER, MAGIC
from runtime.huggingface.mapping import our_shapes
from runtime.huggingface.stored_model import StoredModel
from tests.fuzz import corrupted
from tests.fuzz.hostile_pickles import CALLS, call, calling_pickles, dumped, pickle_bombs

CANARY = "canary"
DATA_FILE = "__0_0.distcp"


@dataclass(frozen=True)
class Hostile:
    """A folder that is to be read."""

    name: str
    files: Mapping[str, bytes | Path]
    """Files of the folder by name: their bytes, or the path that a link leads to."""
    read: Callable[[Path], Any]


def model() -> ModelSpec:
    """Small, with a tensor of each kind."""
    fields = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 30, "seq": 8, "ffn": 32, "max_positions": 8}
    return ModelSpec.model_validate(
        {"name": "victim", "position": "learned", "norm": "layernorm", "gated": False, "tied": True} | fields
    )


def write_checkpoint(folder: Path) -> None:
    """A whole checkpoint, which is then changed."""
    wholes = {name: Whole(tuple(shape), torch.float32) for name, shape in our_shapes(model()).items()}
    partial_folder = checkpoint.partial_folder(folder, 3)
    pieces = [
        Piece(name, (0,) * len(whole.shape), whole.shape, partial(torch.ones, whole.shape))
        for name, whole in wholes.items()
    ]
    write_tensors(partial_folder, wholes, pieces)
    run = {"iteration": 3, "model": model().model_dump(mode="json"), "consumed_samples": 0}
    checkpoint.publish(folder, 3, run, checkpoint.file_records(partial_folder))


def read_checkpoint(folder: Path) -> Any:
    """All of a checkpoint, as `convert` and `generate` read it."""
    stored = StoredModel(folder)
    return {name: stored.read_ours(name) for name in stored.shapes}


def read_plan(folder: Path) -> Any:
    """A plan as commands show it."""
    plan = Plan.load(folder / "plan.json")
    return plan.layout.describe(), plan.model.parameters, plan.timeline(), plan.run("1B", 2.0)


def hostile(folder: Path, plan: Plan) -> Iterator[Hostile]:
    """All variants, of a checkpoint that is written to `folder` and of a plan."""
    canary = folder / CANARY
    write_checkpoint(folder / "checkpoint")
    valid = folder / "checkpoint" / "iter_0000003"
    files: dict[str, bytes] = {path.name: path.read_bytes() for path in sorted(valid.iterdir())}
    for name, metadata in _metadata(files[".metadata"], canary):
        yield _changed(f".metadata: {name}", files, {".metadata": metadata})
    for name, change in _tensors(files, canary):
        yield _changed(f"tensors: {name}", files, change)
    for name, file, place in _special(folder):
        if file == checkpoint.MANIFEST:
            yield _checkpoint(name, {**files, file: place})
        else:
            yield _changed(name, files, {file: place})
    for name, manifest in _manifests(files):
        yield _checkpoint(f"manifest.json: {name}", {**files, checkpoint.MANIFEST: manifest})
    run = json.loads(files[checkpoint.RUN_FILE])
    for name, content in _documents(run, ("model.name", "model.layers", "model.vocab", "iteration")):
        yield _changed(f"run.json: {name}", files, {checkpoint.RUN_FILE: content})
    for text in (b"../../etc", b"3\0", b"-3", b"9" * 18, b"\xff" * 99, b"3; touch x", b"[" * 10**6):
        yield _checkpoint(f"tracker: {text[:12]!r}", files, tracker=text)
    for end in ("/dev/zero", "/dev/stdin", str(_pipe(folder))):
        yield _checkpoint(f"tracker: {end}", files, tracker=Path(end))
    both = {"config.json": b"{}", "model.safetensors": b""}
    yield _checkpoint("a Hugging Face model too", files, beside=both)
    paths: tuple[str, ...] = (
        "model.name",
        "model.hidden",
        "model.layers",
        "cluster.world_size",
        "cluster.device.name",
    )
    paths += ("layout.data_parallel", "layout.micro_batch_size", "layout.global_batch_size", "reason")
    for name, content in _documents(plan.model_dump(mode="json"), paths):
        yield Hostile(f"plan: {name}", {"plan.json": content}, read_plan)
    for place in (Path("/dev/zero"), Path("/dev/tty"), _pipe(folder), Path("/proc/self/mem"), Path("/")):
        yield Hostile(f"plan: {place}", {"plan.json": place}, read_plan)
    yield from _token_files(folder)


def attack(variant: Hostile, folder: Path, canary: Path) -> tuple[str, str]:
    """The outcome of reading a variant, as `corrupted.judge` tells it; nothing may have been run."""
    for name, content in variant.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
    outcome, what = corrupted.judge(lambda: variant.read(folder), None, checked=False)
    shutil.rmtree(folder)
    if canary.exists():
        canary.unlink()
        return "failed", "runs what is in it"
    return outcome, what


def _checkpoint(
    name: str,
    files: Mapping[str, bytes | Path],
    tracker: bytes | Path = b"3",
    beside: Mapping[str, bytes] | None = None,
) -> Hostile:
    inside: dict[str, bytes | Path] = {f"iter_0000003/{one}": data for one, data in files.items()}
    return Hostile(name, {**inside, checkpoint.TRACKER: tracker, **(beside or {})}, read_checkpoint)


def _changed(name: str, files: Mapping[str, bytes], change: Mapping[str, bytes | Path]) -> Hostile:
    """A checkpoint with other files and a manifest that agrees with them."""
    every = {**files, **change}
    del every[checkpoint.MANIFEST]
    records = {
        one: record_of(data) if isinstance(data, bytes) else record_of(b"") for one, data in every.items()
    }
    return _checkpoint(name, {**every, checkpoint.MANIFEST: manifest_text(records).encode()})


def _metadata(valid: bytes, canary: Path) -> Iterator[tuple[str, bytes]]:
    """Files of metadata by their fault."""
    for module, name in CALLS:
        made = call(module, name, canary)
        for protocol in (0, 2, 4, 5):
            yield f"{module}.{name} by protocol {protocol}", dumped(made, protocol)
        yield f"{module}.{name} before what is valid", dumped(made, 4)[:-1] + b"0" + valid
        yield f"{module}.{name} after what is valid", valid[:-1] + dumped(made, 4)[11:-1] + b"0."
    for where, metadata in _with(valid, call("posix", "system", canary)):
        yield f"a call as {where}", dumped(metadata)
    for name, data in calling_pickles(canary):
        yield name, data
    for name, data in pickle_bombs(valid):
        yield name, data
    for where, metadata in _lies(valid):
        yield where, dumped(metadata)


def _with(valid: bytes, what: Any) -> Iterator[tuple[str, Any]]:
    """The metadata with something in the place of each kind of field."""

    def fresh() -> tuple[Metadata, str, Any]:
        metadata: Any = pickle.loads(valid)
        name, stored = next(iter(metadata.state_dict_metadata.items()))
        return metadata, name, stored

    for field in ("planner_data", "storage_data", "storage_meta", "version", "state_dict_metadata"):
        metadata, _, _ = fresh()
        setattr(metadata, field, what)
        yield field, metadata
    for field in ("properties", "size", "chunks"):
        metadata, _, stored = fresh()
        setattr(stored, field, what)
        yield field, metadata
    for field in ("dtype", "layout"):
        metadata, _, stored = fresh()
        setattr(stored.properties, field, what)
        yield field, metadata
    for field in ("offsets", "sizes"):
        metadata, _, stored = fresh()
        setattr(stored.chunks[0], field, what)
        yield field, metadata
    for field in ("relative_path", "offset", "length", "transform_descriptors"):
        metadata, _, _ = fresh()
        setattr(next(iter(metadata.storage_data.values())), field, what)
        yield field, metadata


def _lies(valid: bytes) -> Iterator[tuple[str, Any]]:
    """Metadata of the right classes that is untrue."""
    for path in ("../run.json", "/etc/passwd", "/dev/zero", "", ".", "..", "a\0b", "run.json", "x" * 5000):
        metadata: Any = pickle.loads(valid)
        for place in metadata.storage_data.values():
            place.relative_path = path
        yield f"tensors in {path[:20]!r}", metadata
    for offset, length in ((-1, 10), (2**62, 10), (0, 2**62), (0, 0), (10**400, 1), (True, 2.5), (10**6, 9)):
        metadata = pickle.loads(valid)
        for place in metadata.storage_data.values():
            place.offset, place.length = offset, length
        yield f"tensors at {str(offset)[:9]}, {length} long", metadata
    for size in ((2**62,), (2**40, 2**40), (1,) * 1000, (-1, 16), (), (10**400, 1)):
        metadata = pickle.loads(valid)
        for stored in metadata.state_dict_metadata.values():
            shape: Any = _Size(size)
            stored.size = shape
            stored.chunks = [ChunkStorageMetadata(shape, shape)]
        yield f"tensors of the shape {str(size)[:20]}", metadata
    metadata = pickle.loads(valid)
    metadata.state_dict_metadata = {name: BytesStorageMetadata() for name in metadata.state_dict_metadata}
    yield "objects that are no tensors", metadata
    metadata = pickle.loads(valid)
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]
    yield "compressed tensors", metadata
    metadata = pickle.loads(valid)
    for stored in metadata.state_dict_metadata.values():
        stored.chunks = []
    yield "tensors without pieces", metadata
    metadata = pickle.loads(valid)
    metadata.storage_data = {MetadataIndex("nobody"): _StorageInfo(DATA_FILE, 0, 1)}
    yield "pieces that lie nowhere", metadata
    metadata = pickle.loads(valid)
    nothing: Any = None
    metadata.state_dict_metadata["more"] = TensorStorageMetadata(nothing, nothing, nothing)
    yield "a tensor without anything", metadata


class _Size:
    """`torch.Size` of numbers that it would refuse."""

    def __init__(self, numbers: tuple[Any, ...]) -> None:
        self.numbers = numbers

    def __reduce__(self) -> Any:
        return torch.Size, (self.numbers,)


class _Spawns:
    """Runs the command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def _tensors(files: Mapping[str, bytes], canary: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Files of tensors: each is put where the metadata says that every tensor lies."""

    def saved(value: Any, **how: Any) -> bytes:
        file = io.BytesIO()
        torch.save(value, file, **how)
        return file.getvalue()

    trap = _Spawns(canary)
    archives = {
        "a call": saved(trap),
        "a call in a dictionary": saved({"weight": torch.ones(3), "x": trap}),
        "a call of the old format": saved(trap, _use_new_zipfile_serialization=False),
        "a plain pickle": pickle.dumps(trap),
        "a tensor of the old format": saved(torch.ones(30, 16), _use_new_zipfile_serialization=False),
        "no tensor": saved({"a": 1}),
        "a text": saved("tensor"),
        "a sparse tensor": saved(torch.ones(30, 16).to_sparse()),
        "a tensor of another shape": saved(torch.ones(2, 2, 2)),
        "a number": saved(torch.ones(())),
        "complex numbers": saved(torch.ones(30, 16, dtype=torch.complex64)),
        "nothing": b"",
        "zeros": bytes(5000),
        "an unpacked bomb": _deflated(saved(torch.zeros(30, 16))),
        "a tar archive": _tar(canary),
    }
    for name, archive in archives.items():
        metadata: Metadata = pickle.loads(files[".metadata"])
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, len(archive)
        yield name, {DATA_FILE: archive, ".metadata": pickle.dumps(metadata, 4)}


def _deflated(archive: bytes) -> bytes:
    target = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as old,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for one in old.infolist():
            data = bytes(1 << 26) if one.filename.endswith("data/0") else old.read(one)
            new.writestr(one.filename, data)
    return target.getvalue()


def _tar(canary: Path) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            data = pickle.dumps(_Spawns(canary), 2)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return target.getvalue()


def _special(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Files that have no end, or never begin."""
    for name in (".metadata", DATA_FILE, checkpoint.RUN_FILE, checkpoint.MANIFEST):
        for place in (Path("/dev/zero"), _pipe(folder), Path("/")):
            yield f"{name}: {place.name or place}", name, place


def _pipe(folder: Path) -> Path:
    path = folder / "pipe"
    if not path.exists():
        os.mkfifo(path)
    return path


def _manifests(files: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Manifests whose own checksum is right."""
    record = record_of(b"").model_dump()
    names = ("../../etc/passwd", "/etc/passwd", "..", ".", "", "a/b", "a\0b", "a\nb", "x" * 10**5, "é")
    for name in names:
        yield f"a file {name[:20]!r}", _manifest({name: record})
    sizes: tuple[Any, ...] = (-1, 2**62, 2**70, 10**400, 1.5, True, None, "0", [], float("nan"))
    for size in sizes:
        yield f"a file of {str(size)[:9]} bytes", _manifest({"run.json": {**record, "bytes": size}})
    yield "a million files", _manifest({f"f{number}": record for number in range(100_000)})
    for text in (b"", b"[]", b"null", b"[" * 10**6, b'{"files": ' * 10**5, b"\xff", b"1" * 10**5):
        yield f"{text[:10]!r}", text


def _manifest(files: Mapping[str, Any]) -> bytes:
    crc = zlib.crc32(json.dumps(files, sort_keys=True).encode())
    return json.dumps({"files": files, "crc32": f"{crc:08x}"}).encode()


def _documents(valid: Any, paths: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """JSON of a plan or a run with a field that no such thing has."""
    values: tuple[Any, ...] = (
        "a\0b",
        "\x1b[31m\nx",
        "x" * 10**6,
        2**40,
        2**62,
        2**70,
        10**400,
        -1,
        {"a": 1},
        [],
    )
    for path in paths:
        for value in values:
            document = json.loads(json.dumps(valid))
            *parents, last = path.split(".")
            target = document
            for name in parents:
                target = target[name]
            target[last] = value
            yield f"{path} = {str(value)[:20]!r}", json.dumps(document).encode()
    for text in (
        b"",
        b"[]",
        b"null",
        b"[" * 10**6,
        b'{"a": ' * 10**5,
        b"\xff\xfe",
        b"1" * 10**5,
        b'"\\u0000"',
    ):
        yield f"{text[:10]!r}", text


def _token_files(folder: Path) -> Iterator[Hostile]:
    from runtime.data import IndexedDataset

    def read(where: Path) -> Any:
        pair = IndexedDataset(where / "text")
        return pair.read(0, 1), len(pair)

    def header(sequences: int, documents: int) -> bytes:
        return HEADER.pack(MAGIC, 1, 8, sequences, documents)

    for sequences, documents in ((2**64 - 1, 2**64 - 1), (2**61, 1), (1, 2**61), (2**63, 0)):
        files = {"text.idx": header(sequences, documents), "text.bin": b"\0\0"}
        yield Hostile(f".idx: {sequences:g} sequences, {documents:g} documents", files, read)
    whole = header(1, 2) + struct.pack("<iqqq", 1, 0, 0, 1)
    for place in (Path("/dev/zero"), _pipe(folder), Path("/")):
        yield Hostile(f".idx: {place}", {"text.idx": place, "text.bin": b"\0\0"}, read)
        yield Hostile(f".bin: {place}", {"text.idx": whole, "text.bin": place}, read)
