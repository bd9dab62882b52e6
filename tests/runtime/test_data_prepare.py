"""Text files to token files: every format, any number of workers, and nothing written when it fails."""

from __future__ import annotations

import bz2
import errno
import gc
import gzip
import json
import lzma
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import pairwise
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.errors import InputError
from runtime.data import corpus, documents, json_array
from runtime.data.corpus import stdlib_corpus
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.preparation import prepare
from runtime.data.summary import Summary
from runtime.data.tokenizers import ByteTokenizer, gpt2_tokenizer

BYTES = ByteTokenizer()
MODULE = import_module("runtime.data.preparation")
TEXTS = ["first", "", "zweiter — ✓", "a\nb\n"]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage of other tests is collected meanwhile: finalizers fail at the bottom of a deep recursion."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def jsonl(texts: list[str], key: str = "text") -> str:
    return "".join(json.dumps({"id": number, key: text}) + "\n" for number, text in enumerate(texts))


def written(prefix: Path) -> list[str]:
    dataset = IndexedDataset(prefix)
    ends = dataset.document_indices.tolist()
    return [
        "".join(BYTES.decode(dataset.get(sequence)) for sequence in range(start, end))
        for start, end in pairwise(ends)
    ]


def prepared(folder: Path, content: str, name: str = "in.jsonl", **options: object) -> Summary:
    (folder / name).write_text(content, newline="")
    options = {"workers": 1, **options}
    return prepare([folder / name], folder / "out", BYTES, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.jsonl", jsonl(TEXTS)),
        ("in", jsonl(TEXTS)),
        ("in.jsonl", "\n" + jsonl(TEXTS).replace("\n", "\r\n\n")),
        ("in.jsonl", "\ufeff" + jsonl(TEXTS)),
        ("in.json", json.dumps(TEXTS)),
        ("in", json.dumps([{"text": text} for text in TEXTS], indent=2)),
        ("in.json", "\ufeff" + json.dumps(TEXTS, ensure_ascii=False, indent=1)),
    ],
)
def test_all_json_formats_give_the_same_documents(tmp_path: Path, name: str, content: str) -> None:
    summary = prepared(tmp_path, content, name)
    assert summary.prefix == tmp_path / "out_text_document"
    assert written(summary.prefix) == TEXTS
    assert summary.documents == 4
    assert len(content.encode()) - summary.bytes_read in (0, len("\ufeff".encode()))


def test_end_of_document_follows_only_documents_with_text(tmp_path: Path) -> None:
    summary = prepared(tmp_path, jsonl(["ab", "", "c"]))
    dataset = IndexedDataset(summary.prefix)
    assert dataset.tokens.tolist() == [97, 98, 256, 99, 256]
    assert dataset.document_indices.tolist() == [0, 1, 1, 2]
    summary = prepared(tmp_path, jsonl(["ab", "", "c"]), append_eod=False)
    assert IndexedDataset(summary.prefix).tokens.tolist() == [97, 98, 99]
    assert summary.tokens == 3


def test_each_text_file_is_one_document(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.txt", "b.md", "c")]
    for path, text in zip(paths, ("[not] {json}\n\nb", "[link](x)", "plain"), strict=True):
        path.write_text(text)
    summary = prepare(paths, tmp_path / "out", BYTES, workers=1)
    assert written(summary.prefix) == ["[not] {json}\n\nb", "[link](x)", "plain"]


def naive(rows: list[dict[str, str | list[str]]], key: str, append_eod: bool) -> tuple[bytes, bytes]:
    """The files of Megatron's preprocess_data.py, document by document; ids are bytes."""
    tokens: list[int] = []
    lengths: list[int] = []
    ends = [0]
    for row in rows:
        text = row[key]
        sentences = [list(one.encode()) for one in (text if isinstance(text, list) else [text]) if one]
        if sentences and append_eod:
            sentences[-1].append(256)
        tokens += [token for sentence in sentences for token in sentence]
        lengths += map(len, sentences)
        ends.append(len(lengths))
    pointers = [2 * sum(lengths[:number]) for number in range(len(lengths))]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(ends))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers)
    return struct.pack(f"<{len(tokens)}H", *tokens), index + struct.pack(f"<{len(ends)}q", *ends)


TEXT = st.text(st.sampled_from("ab \n\té✓"), max_size=4)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.fixed_dictionaries({"text": TEXT | st.lists(TEXT, max_size=3), "title": TEXT})),
    append_eod=st.booleans(),
    chunk_size=st.integers(1, 4),
)
def test_files_are_megatrons_byte_for_byte(rows: list, append_eod: bool, chunk_size: int) -> None:
    rows = [*rows, {"text": " ", "title": ""}]
    with tempfile.TemporaryDirectory() as name:
        content = "".join(json.dumps(row) + "\n" for row in rows)
        prepared(
            Path(name),
            content,
            json_keys=["text", "title", "text"],
            append_eod=append_eod,
            chunk_size=chunk_size,
        )
        for key in ("text", "title"):
            expected = naive(rows, key, append_eod)
            for ending, data in zip(("bin", "idx"), expected, strict=True):
                assert Path(name, f"out_{key}_document.{ending}").read_bytes() == data
        # The text, and of each key the pair and the record of its tokenizer.
        assert len(list(Path(name).iterdir())) == 7


WIKI = """<doc id="12" url="https://x/12" title="One">
One

First line.
&lt;tag&gt;

</doc>
<doc id="13" url="https://x/13" title="Two">
Two
</doc>
"""


def test_wikiextractors_documents_and_its_json(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "AA"
    folder.mkdir(parents=True)
    (folder / "wiki_01").write_text(WIKI.replace("</doc>\n<doc", "</doc>\n\n<doc"))
    (folder / "wiki_00").write_text(jsonl(["of json"]))
    (folder / "_EMPTY").write_text("")
    (folder / ".hidden").write_text("hidden")
    (tmp_path / "in" / "z.txt").write_text("last")
    summary = prepare([tmp_path / "in"], tmp_path / "out", BYTES, append_eod=False, workers=1)
    assert written(summary.prefix) == ["of json", "One\n\nFirst line.\n&lt;tag&gt;", "Two", "last"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WIKI[: WIKI.rindex("</doc>")], r"wiki:9: the <doc ...> of line 8 has no </doc>"),
        (WIKI + "stray", r"wiki:11: text outside of <doc ...> and </doc>: b'stray'"),
        (WIKI.encode().replace(b"First", b"\xff"), r"wiki:4: not UTF-8 text: byte 5"),
    ],
)
def test_broken_wiki_files_are_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    (tmp_path / "wiki").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        prepare([tmp_path / "wiki"], tmp_path / "out", BYTES, workers=1)


def compress(data: bytes, ending: str) -> bytes:
    if ending == "zst":
        zstandard = pytest.importorskip("zstandard")
        # Two frames, as parallel compressors write.
        half = len(data) // 2
        compressor = zstandard.ZstdCompressor()
        return compressor.compress(data[:half]) + compressor.compress(data[half:])
    compress: dict[str, Callable[[bytes], bytes]]
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    return compress[ending](data)


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.json", "in"])
def test_compressed_files_are_read_as_they_were(tmp_path: Path, name: str, ending: str) -> None:
    content = json.dumps(TEXTS * 50) if name == "in.json" else jsonl(TEXTS * 50)
    path = tmp_path / f"{name}.{ending}"
    packed = compress(content.encode(), ending)
    path.write_bytes(packed)
    seen: list[Summary] = []
    summary = prepare(
        [path], tmp_path / "out", BYTES, append_eod=False, workers=1, chunk_size=9, progress=seen.append
    )
    assert written(summary.prefix) == TEXTS * 50
    assert (summary.bytes_read, summary.bytes_taken) == (len(content.encode()), len(packed))
    for file in tmp_path.glob("out_text_document.*"):
        file.unlink()
    for damaged in (packed[: len(packed) * 2 // 3], packed[:10] + b"\0\0\0\0" + packed[14:], b"plain"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"{name}.{ending}.*(damaged or incomplete|bad JSON|not UTF-8)"):
            prepare([path], tmp_path / "out", BYTES, workers=1)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        prepared(tmp_path, jsonl(["a"]))
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


def test_format_and_key_can_be_given(tmp_path: Path) -> None:
    summary = prepared(tmp_path, jsonl(["x"], "body"), json_keys="body")
    assert summary.prefix.name == "out_body_document" and written(summary.prefix) == ["x"]
    summary = prepared(tmp_path, jsonl(["x"]), form="text")
    assert written(summary.prefix) == [jsonl(["x"])]


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores, so that as many workers run as are asked for on any machine."""
    monkeypatch.setattr(MODULE, "available_cores", lambda: 8)


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, many_cores: None) -> None:
    texts = [f"document {number} " * (number % 7) for number in range(300)]
    (tmp_path / "a.jsonl").write_text(jsonl(texts))
    (tmp_path / "b.json").write_text(json.dumps(texts[::-1]))
    gpt2 = gpt2_tokenizer()
    files = []
    for workers, chunk_size in ((1, 1024), (1, 7), (2, 11), (3, 64)):
        prefix = tmp_path / f"w{workers}-{chunk_size}"
        seen: list[Summary] = []
        summary = prepare(
            [tmp_path / "a.jsonl", tmp_path / "b.json"],
            prefix,
            gpt2,
            workers=workers,
            chunk_size=chunk_size,
            progress=seen.append,
        )
        assert seen[-1] == summary and summary.documents == 600
        assert [item.documents for item in seen] == sorted({item.documents for item in seen})
        files.append([Path(f"{summary.prefix}.{ending}").read_bytes() for ending in ("bin", "idx")])
    assert files[0] == files[1] == files[2] == files[3]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.text(max_size=30) | st.dictionaries(st.text(max_size=3), st.text(max_size=9)), max_size=9
    ),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    read=st.integers(1, 40),
)
def test_array_is_read_as_json_reads_it(
    values: list, indent: int | None, ascii_only: bool, read: int
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # As few characters at a time as one, so that every element is cut somewhere.
        patch.setattr(json_array, "_READ_CHARS", read)
        path = Path(folder) / "a.json"
        path.write_text(text, "utf-8", newline="")
        pieces = list(documents.read_pieces(path, "json", 2))
    assert [value for piece in pieces for value in piece.documents] == values
    assert sum(piece.size for piece in pieces) == len(text.encode())
    assert all(len(piece.documents) <= 2 for piece in pieces)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.jsonl", jsonl(["a"]) + '{"text": \n', r"in\.jsonl:2: bad JSON: Expecting value"),
        ("in.jsonl", jsonl(["a"]) + "[1]\n", r"in\.jsonl:2: expected a string or an object"),
        (
            "in.jsonl",
            '{"body": "x"}\n',
            r"in\.jsonl:1: no 'text' in this object: give --json-keys one of 'body'",
        ),
        (
            "in.jsonl",
            '{"1": {"text": "x"}, "2": {"text": "y"}}',
            r"in\.jsonl:1: no 'text' in this object, and no other text; expected an object for each text",
        ),
        (
            "in.json",
            '{\n  "text": "x"\n}\n',
            r"in\.json:1: bad JSON: .*; expected a whole object on each line, or",
        ),
        ("in.jsonl", '{"text": 3}\n', r"in\.jsonl:1: 'text' is a int"),
        ("in.jsonl", '{"text": ["a", 3]}\n', r"in\.jsonl:1: 'text' is a list, expected a string or a list"),
        ("in.jsonl", '{"text": "\\ud800"}\n', r"in\.jsonl:1: a lone surrogate"),
        ("in.jsonl", "[" * 100_000 + "\n", r"in\.jsonl:1: bad JSON"),
        ("in.jsonl", "", "holds no text"),
        ("in.jsonl", '{"text": ""}', "holds no text"),
        ("in.json", "plain words", r"in\.json:1: bad JSON"),
        ("in.json", '["a",\n"b" "c"]', r"in\.json:2: bad JSON array: expected ']', found '\"'"),
        ("in.json", '["a",\n\n nope]', r"in\.json:3: bad JSON: Expecting value"),
        ("in.json", '["a",\n{"text": 1,}]', r"in\.json:2: bad JSON: "),
        ("in.json", '["a", "b', r"in\.json:1: bad JSON: Unterminated"),
        ("in.json", '["a", "b"', r"in\.json:1: bad JSON array: expected ']', found the end of the file"),
        ("in.json", '["a"] x', r"in\.json:1: text after the end"),
        ("in.json", '["a",\n 7]', r"in\.json:2: expected a string or an object with 'text', found a int"),
    ],
)
def test_bad_json_names_file_and_line_and_writes_nothing(
    tmp_path: Path, uncollected: None, name: str, content: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        prepared(tmp_path, content, name)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_error_in_a_worker_is_the_same_line(tmp_path: Path, many_cores: None) -> None:
    with pytest.raises(InputError, match=r"in\.jsonl:41: bad JSON"):
        prepared(tmp_path, jsonl(["a"] * 40) + "{\n" + jsonl(["b"] * 400), workers=2, chunk_size=8)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


class DyingTokenizer(ByteTokenizer):
    """Ends the process that encodes, as the kernel does when memory runs out."""

    def encode(self, texts: Sequence[str]) -> NoReturn:
        os._exit(1)


def test_a_killed_worker_is_one_line(tmp_path: Path, many_cores: None) -> None:
    (tmp_path / "in.jsonl").write_text(jsonl(["a", "b"]))
    with pytest.raises(InputError, match="--workers 2: a worker process was killed"):
        prepare([tmp_path / "in.jsonl"], tmp_path / "out", DyingTokenizer(), workers=2, chunk_size=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("cores", "wanted", "documents", "started"),
    [(4, 1000, 3, 3), (4, 1000, 9, 4), (4, 2, 9, 2), (4, None, 9, 4), (4, 1000, 1, None), (1, 1000, 9, None)],
)
def test_no_more_workers_start_than_there_are_cores_or_pieces(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    wanted: int | None,
    documents: int,
    started: int | None,
) -> None:
    counts: list[int] = []

    class Pool(ThreadPoolExecutor):
        """Counts its workers, and starts none but threads."""

        def __init__(self, workers: int, mp_context: BaseContext, **options: Any) -> None:
            counts.append(workers)
            super().__init__(workers, **options)

    monkeypatch.setattr(MODULE, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Threads take no signals.
    monkeypatch.setattr(MODULE, "available_cores", lambda: cores)
    # Only a process has signals of its own.
    monkeypatch.setattr(MODULE.signal, "signal", lambda *_: None)
    texts = [f"document {number}" for number in range(documents)]
    summary = prepared(tmp_path, jsonl(texts), workers=wanted, chunk_size=1)
    assert counts == ([] if started is None else [started])
    assert written(summary.prefix) == texts


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.json"])
def test_text_that_is_not_utf8_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'["a\xff"]')
    with pytest.raises(InputError, match="not UTF-8"):
        prepare([tmp_path / name], tmp_path / "out", BYTES, workers=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": []}, "--input"),
        ({"inputs": ["none.txt"]}, "--input none.txt: no such file"),
        ({"inputs": ["tests/runtime/none"]}, "no such file"),
        ({"workers": 0}, "--workers 0"),
        ({"chunk_size": 0}, "--chunk-size 0"),
        ({"form": "xml"}, "--format 'xml'"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, options: dict, message: str) -> None:
    arguments = {"inputs": [__file__], "output_prefix": tmp_path / "out", "tokenizer": BYTES, **options}
    with pytest.raises(InputError, match=message):
        prepare(**arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "stdlib"
    for name in ("a.py", "b.py", "pkg/c.py", "pkg/tests/d.py", "site-packages/e.py", "test/f.py", "g.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    (folder / "h.py").write_bytes(b"# \xff\n")
    return folder


def test_corpus_holds_the_sources_without_tests_and_is_prepared_once(tmp_path: Path, sources: Path) -> None:
    prefix = stdlib_corpus(BYTES, tmp_path / "cache", sources)
    assert sorted(written(prefix)) == ["# a.py\n", "# b.py\n", "# pkg/c.py\n"]
    before = prefix.with_suffix(".bin").stat().st_mtime_ns
    assert stdlib_corpus(BYTES, tmp_path / "cache", sources) == prefix
    assert prefix.with_suffix(".bin").stat().st_mtime_ns == before
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [prefix.parent.name]


def test_damaged_corpus_is_prepared_anew(tmp_path: Path, sources: Path) -> None:
    prefix = stdlib_corpus(BYTES, tmp_path / "cache", sources)
    prefix.with_suffix(".idx").write_bytes(b"")
    assert len(written(stdlib_corpus(BYTES, tmp_path / "cache", sources))) == 3


def test_corpus_of_another_tokenizer_or_library_is_another(tmp_path: Path, sources: Path) -> None:
    prefixes = {stdlib_corpus(tokenizer, tmp_path, sources) for tokenizer in (BYTES, gpt2_tokenizer())}
    (sources / "a.py").write_text("# changed\n")
    prefixes.add(stdlib_corpus(BYTES, tmp_path, sources))
    assert len(prefixes) == 3


def test_corpus_is_capped(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_MOST_BYTES", 16)
    assert 1 <= len(written(stdlib_corpus(BYTES, tmp_path / "cache", sources))) <= 2


def test_unwritable_cache_falls_back_to_a_temporary_folder(tmp_path: Path, sources: Path) -> None:
    (tmp_path / "file").write_text("")
    prefix = stdlib_corpus(BYTES, tmp_path / "file" / "cache", sources)
    assert len(written(prefix)) == 3 and tmp_path not in prefix.parents


def test_a_process_that_is_overtaken_takes_the_winners_corpus(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*arguments: object, **options: object) -> Summary:
        monkeypatch.setattr(corpus, "prepare", prepare)
        stdlib_corpus(BYTES, tmp_path / "cache", sources)
        return prepare(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(corpus, "prepare", overtaken)
    prefix = stdlib_corpus(BYTES, tmp_path / "cache", sources)
    assert len(written(prefix)) == 3
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [prefix.parent.name]


def test_python_without_sources_asks_for_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give --data-path"):
        stdlib_corpus(BYTES, tmp_path, tmp_path)


def test_ids_stay_within_the_tokens_type(tmp_path: Path) -> None:
    prefix = prepared(tmp_path, jsonl(["é"])).prefix
    assert IndexedDataset(prefix).dtype == np.uint16


def test_a_dictionary_instead_of_an_array_says_what_was_expected(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text('{"text": "x"}')
    with pytest.raises(
        InputError, match=r"in\.json:1: a JSON dictionary; expected an array of texts or of objects"
    ):
        list(documents.read_pieces(path, "json", 2))
