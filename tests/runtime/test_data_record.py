"""The tokenizer of a corpus is known beside its token files, to merge, blend, read and train on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf

from costmodels.errors import InputError
from runtime.data.description import describe
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.indexed_writer import IndexedWriter
from runtime.data.merge import merge
from runtime.data.preparation import prepare
from runtime.data.record import digest, read_record
from runtime.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from runtime.huggingface.tokenizer_files import write_tokenizer
from runtime.job.datasets import model_tokenizer, open_datasets, tokenizer_for
from runtime.settings.training_options import DataOptions
from tests.support.hub import cache_model
from tests.support.models import MODELS

BYTES = ByteTokenizer()
SPEC = MODELS["gpt2"].model_copy(update={"vocab": 300, "seq": 16})
TEXT = "hi there, all the world\n" * 20


def small(folder: Path, pair: str = "h i") -> Tokenizer:
    """Bytes and one pair, read from files in `folder`."""
    folder.mkdir(exist_ok=True)
    symbols = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*symbols, pair.replace(" ", ""), "<|endoftext|>"]
    (folder / "v.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "m.txt").write_text(f"#version: 0.2\n{pair}\n")
    return load_tokenizer("GPT2BPETokenizer", folder / "v.json", folder / "m.txt")


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[[str, Tokenizer], Path]:
    (tmp_path / "in").mkdir()
    for number in range(10):
        (tmp_path / "in" / f"{number}.txt").write_text(TEXT)

    def made(name: str, tokenizer: Tokenizer) -> Path:
        return prepare([tmp_path / "in"], tmp_path / name, tokenizer, workers=1, form="text").prefix

    return made


Made = Callable[[str, Tokenizer], Path]


def unrecorded(prefix: Path, ids: list[int]) -> Path:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document(ids)
    return prefix


def record(prefix: Path) -> str | None:
    found = read_record(IndexedDataset(prefix))
    return None if found is None else found.name


def test_pairs_of_two_tokenizers_are_not_merged(tmp_path: Path, corpus: Made) -> None:
    """Both have ids of one width, so that nothing in the pairs tells them apart."""
    first, second = small(tmp_path / "one"), small(tmp_path / "two", "t h")
    a, b = corpus("a", first), corpus("b", second)
    with pytest.raises(InputError) as caught:
        merge([a, a, b], tmp_path / "all")
    message = str(caught.value)
    assert f"--input {b}: was prepared with {second.name} (258 ids, 257 ends" in message
    assert f"but {a} with {first.name} (258 ids" in message and "\n" not in message
    assert list(tmp_path.glob("*all*")) == []


def test_a_tokenizer_is_the_same_wherever_its_files_lie(tmp_path: Path, corpus: Made) -> None:
    one, two = small(tmp_path / "one"), small(tmp_path / "two")
    write_tokenizer(tmp_path / "three", one)
    three = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path / "three")
    assert three.name != one.name
    said: list[str] = []
    prefixes = [corpus(name, tokenizer) for name, tokenizer in (("a", one), ("b", two), ("c", three))]
    merge(prefixes, tmp_path / "all", note=said.append)
    assert said == [] and record(tmp_path / "all") == one.name
    write_tokenizer(tmp_path / "bytes", BYTES)
    assert digest(load_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path / "bytes")) == digest(BYTES)


def test_what_has_no_record_is_merged_with_a_note(tmp_path: Path, corpus: Made) -> None:
    a, target = corpus("a", BYTES), tmp_path / "all"
    merge([a], target)
    assert record(target) == "bytes"
    plain = unrecorded(tmp_path / "plain", [104, 105, 256])
    said: list[str] = []
    merge([plain, a], target, note=said.append)
    (line,) = said
    assert line.startswith(f"{plain} has no record of a tokenizer: taken to be of bytes")
    # The record of earlier files of this name is gone.
    assert not Path(f"{target}.tokenizer").exists()
    merge([plain, plain], tmp_path / "both", note=said.append)
    assert len(said) == 2 and "1 more have no record" in said[1]
    strange = unrecorded(tmp_path / "strange", [104, 257])
    with pytest.raises(InputError, match=f"--input {strange}: holds id 257, but {a} was prepared with bytes"):
        merge([a, strange], target)


def test_a_record_of_other_tokens_counts_for_nothing(tmp_path: Path, corpus: Made) -> None:
    a = corpus("a", BYTES)
    other = unrecorded(tmp_path / "other", [300, 301])
    for ending in ("bin", "idx"):
        Path(f"{other}.{ending}").replace(f"{a}.{ending}")
    assert Path(f"{a}.tokenizer").exists() and record(a) is None


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "1", '{"origin": {}}', '{"origin": {"kind": 1}, "sequences": 1, "tokens": 1}', "\xff"],
)
def test_a_damaged_record_is_one_line(corpus: Made, content: str) -> None:
    a = corpus("a", BYTES)
    path = Path(f"{a}.tokenizer")
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"a_text_document\.tokenizer: is not the record of a tokenizer"):
        read_record(IndexedDataset(a))


def test_a_name_of_two_lines_is_no_record(corpus: Made) -> None:
    path = Path(f"{corpus('a', BYTES)}.tokenizer")
    path.write_text(json.dumps({**json.loads(path.read_text()), "name": "by\ntes"}))
    with pytest.raises(InputError, match="is not the record"):
        record(path.with_suffix(""))


def test_a_pair_is_read_with_its_own_tokenizer(
    tmp_path: Path, corpus: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = small(Path("files"))
    a = corpus("a", tokenizer)
    # The tokenizer's files are found from elsewhere too.
    monkeypatch.chdir("/")
    found = describe(a)
    assert found.first_text is not None and found.first_text.startswith("hi there")
    assert (found.tokenizer, found.eod, found.ended, found.looked_at) == (tokenizer.name, 257, 10, 10)
    named = describe(a, BYTES)
    assert (named.tokenizer, named.prepared_with, named.ended) == ("bytes", tokenizer.name, 0)


def test_a_tokenizer_that_is_gone_is_asked_for(tmp_path: Path, corpus: Made) -> None:
    for name, mend, message in (
        ("gone", lambda: (tmp_path / "gone" / "m.txt").unlink(), r"m\.txt: cannot be read: No such file"),
        ("new", lambda: small(tmp_path / "new", "t h"), r"v\.json: is not gpt2-\w+ \(258 ids.*\) any more"),
    ):
        a = corpus(name, small(tmp_path / name))
        mend()
        found = describe(a)
        # The token that ends a document is known all the same.
        assert found.first_text is None and found.ended == 10
        with pytest.raises(InputError, match=message + ".*with --tokenizer-type GPT2BPETokenizer"):
            raise InputError(found.lacking or "")


def options(*paths: Path, **fields: object) -> DataOptions:
    return DataOptions(data_path=[str(path) for path in paths], split="90,10,0", **fields)  # type: ignore[arg-type]


def test_a_run_trains_on_one_tokenizers_ids(tmp_path: Path, corpus: Made) -> None:
    a, b = corpus("a", BYTES), corpus("b", small(tmp_path / "files"))
    with pytest.raises(InputError, match=f"--data-path {b}: was prepared with gpt2-.*, but {a} with bytes"):
        open_datasets(options(a, b), SPEC, 1, 4, 2)
    with pytest.raises(InputError, match=f"--valid-data-path {b}: was prepared with gpt2-"):
        separate = DataOptions(train_data_path=[str(a)], valid_data_path=[str(b)])
        open_datasets(separate, SPEC, 1, 4, 2)
    with pytest.raises(
        InputError, match="--tokenizer-type: bytes is named, but the data was prepared with gpt2"
    ):
        open_datasets(options(b, tokenizer_type="ByteTokenizer"), SPEC, 1, 4, 2)
    plain = unrecorded(tmp_path / "plain", [104] * 400)
    datasets = open_datasets(options(a, plain, tokenizer_type="ByteTokenizer"), SPEC, 1, 4, 0)
    assert datasets.train is not None


def test_a_record_says_what_ends_a_document_and_how_many_ids_there_are(tmp_path: Path, corpus: Made) -> None:
    a = corpus("a", small(tmp_path / "files"))
    boundaries = open_datasets(options(a, eod_mask_loss=True), SPEC, 1, 4, 2).boundaries
    assert boundaries is not None and boundaries.eod == 257
    with pytest.raises(
        InputError, match=r"token id 257, .* give --vocab-size 258, that of gpt2-.*, which prepared it"
    ):
        open_datasets(options(a), SPEC.model_copy(update={"vocab": 257}), 1, 4, 2)


def test_data_of_another_tokenizer_than_the_models_is_refused(
    tmp_path: Path, corpus: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    write_tokenizer(cache_model(tmp_path / "cache", "org/huggingface", {}), BYTES)
    files = tmp_path / "files"
    a, b = corpus("a", BYTES), corpus("b", small(files))
    base = tmp_path / "base"
    write_tokenizer(base / "huggingface", BYTES)
    cases = ((str(base), None), (None, str(base / "huggingface")), (None, "org/huggingface"))
    for load, model in (*cases, (str(base), str(files)), (str(base), "org/huggingface")):
        own = model_tokenizer(load, model)
        assert own is not None and own.tokenizer.vocabulary() == BYTES.vocabulary()
        assert open_datasets(options(a), SPEC, 1, 4, 2, own).train is not None
        place = f"--load {base}" if load else f"--model {model}"
        with pytest.raises(InputError, match=f"^{place} has the tokenizer huggingface-.*prepared with gpt2-"):
            open_datasets(options(b), SPEC, 1, 4, 2, own)
        plain = unrecorded(tmp_path / "plain", [104] * 400)
        with pytest.raises(InputError, match=place):
            named = {"vocab_file": str(files / "v.json"), "merge_file": str(files / "m.txt")}
            open_datasets(options(plain, **named), SPEC, 1, 4, 0, own)
    assert model_tokenizer(None, "gpt2-nano") is None
    # The default corpus takes the model's tokenizer.
    for name, kept in (("v.json", "vocab.json"), ("m.txt", "merges.txt")):
        (files / name).rename(files / kept)
    own = model_tokenizer(None, str(files))
    assert own is not None and tokenizer_for(DataOptions(), SPEC.vocab, own.tokenizer) is own.tokenizer


def test_more_ids_or_another_end_make_no_other_tokenizer(tmp_path: Path, corpus: Made) -> None:
    data = corpus("a", BYTES)
    write_tokenizer(tmp_path / "base", BYTES)
    file = tmp_path / "base" / "tokenizer.json"
    model = hf.Tokenizer.from_file(str(file))
    model.add_special_tokens(["<|pad|>", "<|im_end|>"])
    model.save(str(file))
    (tmp_path / "base" / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    own = model_tokenizer(str(tmp_path / "base"), None)
    assert own is not None and own.tokenizer.eod == 258
    assert open_datasets(options(data), SPEC, 1, 4, 2, own).train is not None
