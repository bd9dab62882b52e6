"""Merging of several pairs of token files, in the order of Megatron-LM's tools/merge_datasets.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from costmodels.errors import InputError
from costmodels.paths import entries, is_file, is_folder, resolved
from runtime.data.description import id_range
from runtime.data.indexed_dataset import IndexedDataset, bare_prefix, bin_path
from runtime.data.indexed_writer import IndexedWriter
from runtime.data.record import KnownTokenizer, common_tokenizer, read_record
from runtime.data.summary import Summary


def prefixes_in(folder: Path) -> list[Path]:
    """The prefixes of the pairs in a folder, by name; raises InputError for half a pair, or none at all."""
    endings: dict[str, set[str]] = {}
    for file in entries(folder):
        if file.suffix in (".bin", ".idx") and is_file(file) and not file.name.startswith("."):
            endings.setdefault(file.stem, set()).add(file.suffix)
    for stem, found in endings.items():
        if len(found) == 1:
            missing = ".idx" if ".bin" in found else ".bin"
            raise InputError(f"--input {folder}: {stem}{found.pop()} is there without its {missing}")
    if not endings:
        raise InputError(f"--input {folder}: holds no .bin/.idx pairs")
    return [folder / stem for stem in sorted(endings)]


def merge(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    progress: Callable[[Summary], object] | None = None,
    note: Callable[[str], object] | None = None,
) -> Summary:
    """Write `{output_prefix}.bin` and `.idx` with the documents of several pairs, one after the other.

    Each of `inputs` is a prefix, or a folder whose pairs are taken by name. All must hold ids of one type,
    and all or none of them modes. `progress` is called after every pair with the summary so far.

    Pairs with the record of a tokenizer must have the same one. The merged pair has it too, unless some pairs
    have no record; `note` is called then.

    Raises InputError, and writes nothing, if a pair is not readable or does not suit the others.
    """
    prefixes = [
        prefix for path in map(Path, inputs) for prefix in (prefixes_in(path) if is_folder(path) else [path])
    ]
    if not prefixes:
        raise InputError("--input: none given: name prefixes of .bin/.idx pairs, or a folder of them")
    target = Path(bare_prefix(output_prefix))
    # Headers and sizes are looked at before anything is written; the files are opened again one by one.
    first, known = IndexedDataset(prefixes[0]), None
    lacking = []
    for prefix in prefixes:
        pair = IndexedDataset(prefix)
        known = common_tokenizer(known, "--input", pair)
        _check_alike(first, pair)
        if read_record(pair) is None:
            lacking.append(prefix)
        if resolved(bin_path(prefix)) == resolved(bin_path(target)):
            raise InputError(f"--output-prefix {output_prefix}: is one of the inputs: give another name")
    if lacking:
        text = _unrecorded(lacking, known)
        if note is not None:
            note(text)
    record = None if lacking or known is None else known[1]
    summary = Summary(target)
    try:
        with IndexedWriter(target, first.dtype.newbyteorder("="), record) as writer:
            for prefix in prefixes:
                pair = IndexedDataset(prefix)
                _check_alike(first, pair)
                writer.add_pair(pair)
                read = pair.token_count * pair.dtype.itemsize
                summary = summary.plus(pair.documents, pair.token_count, read, read)
                if progress:
                    progress(summary)
    except OSError as error:
        raise InputError(f"{error.filename or target}: {error.strerror or error}") from None
    return summary


def _unrecorded(lacking: Sequence[Path], known: KnownTokenizer | None) -> str:
    """The note on pairs without a record; raises `InputError` if they have ids that the known tokenizer
    lacks."""
    others = f" and {len(lacking) - 1} more have" if len(lacking) > 1 else " has"
    said = f"{lacking[0]}{others} no record of a tokenizer"
    if known is None:
        return f"{said}: whether all ids are of one cannot be told"
    for prefix in lacking:
        largest = id_range(IndexedDataset(prefix))[1]
        if largest is not None and largest >= known[1].vocab_size:
            raise InputError(
                f"--input {prefix}: holds id {largest}, but {known[0]} was prepared with {known[1]}: prepare "
                "all with one tokenizer"
            )
    return f"{said}: taken to be of {known[1].name} as {known[0]} is; what is merged has no record either"


def _check_alike(first: IndexedDataset, other: IndexedDataset) -> None:
    if other.dtype != first.dtype:
        raise InputError(
            f"--input {other.prefix}: holds {other.dtype.name} ids, but {first.prefix} {first.dtype.name}: "
            "prepare all with one tokenizer"
        )
    if (other.modes is None) != (first.modes is None) and len(other) and len(first):
        with_modes, without = (first, other) if other.modes is None else (other, first)
        raise InputError(f"--input {with_modes.prefix}: has multimodal modes, but {without.prefix} has none")
