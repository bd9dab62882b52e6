"""Tokenizers: known ids, equality with the published vocabulary, and one line for every wrong file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.errors import InputError
from runtime.data import tokenizers
from runtime.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    gpt2_tokenizer,
    gpt2_vocabulary,
    load_tokenizer,
)

pytestmark = pytest.mark.oldest

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def gpt2() -> BPETokenizer:
    return gpt2_tokenizer()


def test_gpt2_gives_the_published_ids(gpt2: BPETokenizer) -> None:
    hello, code, special = gpt2.encode(["Hello world", "  return x\n", "<|endoftext|>"])
    assert hello.tolist() == [15496, 995]
    assert code.tolist() == [220, 1441, 2124, 198]
    # The name of the special token in a text is text, not the end of the document.
    assert 50256 not in special.tolist()
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)


def test_gpt2_vocabulary_is_rebuilt_from_the_merges(gpt2: BPETokenizer) -> None:
    published = SHARED / "gpt2-vocab.json"
    if not published.exists():
        pytest.skip(f"{published} is not there")
    assert gpt2.model.get_vocab() == json.loads(published.read_text())


def test_gpt2_from_files_equals_the_one_carried(gpt2: BPETokenizer) -> None:
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is not there")
    given = load_tokenizer("GPT2BPETokenizer", SHARED / "gpt2-vocab.json", SHARED / "gpt2-merges.txt")
    text = "Die Überschrift: 3.14 — naïve\n\n\tdef f(x): return x  # ✓"
    assert given.encode([text])[0].tolist() == gpt2.encode([text])[0].tolist()
    assert (given.vocab_size, given.eod) == (50257, 50256)
    assert given.name != gpt2.name


@given(text=st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


@given(text=st.text())
def test_gpt2_round_trip(gpt2: BPETokenizer, text: str) -> None:
    assert gpt2.decode(gpt2.encode([text])[0]) == text


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    model = hf.Tokenizer(hf.models.WordLevel({"a": 0, "b": 1, "</s>": 7}, unk_token="a"))
    model.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    model.enable_truncation(2)
    model.enable_padding(length=8)
    path = tmp_path / "tokenizer.json"
    model.save(str(path))
    return path


def test_tokenizer_json_encodes_whole_documents(json_file: Path) -> None:
    tokenizer = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=json_file.parent)
    assert tokenizer.encode(["a b a b b"])[0].tolist() == [0, 1, 0, 1, 1]
    # Ids may have gaps: the vocabulary reaches up to the largest.
    assert (tokenizer.vocab_size, tokenizer.eod) == (8, 7)


@pytest.mark.parametrize("end", ["b", {"content": "b"}])
def test_the_configured_end_of_a_document_comes_first(json_file: Path, end: object) -> None:
    json_file.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    assert load_tokenizer("HuggingFaceTokenizer", tokenizer_model=json_file).eod == 1


def test_names_tell_contents_apart(json_file: Path) -> None:
    before = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=json_file).name
    json_file.write_text(json_file.read_text().replace('"b"', '"c"'))
    assert load_tokenizer("HuggingFaceTokenizer", tokenizer_model=json_file).name != before


MERGES = "#version: 0.2\nh i\n"
SMALL = [*sorted(hf.pre_tokenizers.ByteLevel.alphabet()), "hi", "<|endoftext|>"]
VOCAB = json.dumps({token: number for number, token in enumerate(SMALL)})


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        (None, MERGES, r"--vocab-file .*v\.json: cannot be read: No such file"),
        (VOCAB, None, r"--merge-file .*m\.txt: cannot be read: No such file"),
        ("{", MERGES, "not JSON: line 1"),
        ("[]", MERGES, "expected a JSON object"),
        ('{"a": "b"}', MERGES, "token: id"),
        ('{"a": 0}', MERGES, "has no <|endoftext|>"),
        (VOCAB, "a b c\n", "line 1 is not a pair"),
        (VOCAB, "h o\n", "does not belong to the merges"),
    ],
)
def test_bad_vocabulary_is_one_line(
    tmp_path: Path, vocab: str | None, merges: str | None, message: str
) -> None:
    for name, content in (("v.json", vocab), ("m.txt", merges)):
        if content is not None:
            (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message.replace("|", r"\|")) as caught:
        load_tokenizer("GPT2BPETokenizer", tmp_path / "v.json", tmp_path / "m.txt")
    assert "\n" not in str(caught.value)


def test_a_small_vocabulary_of_the_same_kind_works(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text(VOCAB)
    (tmp_path / "m.txt").write_text(MERGES.replace("\n", "\r\n"))
    tokenizer = load_tokenizer("GPT2BPETokenizer", tmp_path / "v.json", tmp_path / "m.txt")
    assert tokenizer.encode(["hi"])[0].tolist() == [256] and tokenizer.eod == 257
    assert gpt2_vocabulary([("h", "i")]) == json.loads(VOCAB)


@pytest.mark.parametrize(
    ("kind", "files", "message"),
    [
        ("NoTokenizer", {}, "expected GPT2BPETokenizer, HuggingFaceTokenizer or ByteTokenizer"),
        ("GPT2BPETokenizer", {"vocab_file": "v"}, "--vocab-file given without --merge-file"),
        ("GPT2BPETokenizer", {"merge_file": "m"}, "--merge-file given without --vocab-file"),
        ("HuggingFaceTokenizer", {}, "give --tokenizer-model"),
        ("HuggingFaceTokenizer", {"tokenizer_model": "none.json"}, "none.json: cannot be read"),
        ("HuggingFaceTokenizer", {"tokenizer_model": __file__}, "not a tokenizer.json"),
    ],
)
def test_bad_arguments_are_one_line(kind: str, files: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_tokenizer(kind, **files)


def test_a_tokenizer_without_an_end_of_document_is_refused(json_file: Path) -> None:
    json_file.write_text(json_file.read_text().replace("</s>", "zzz"))
    with pytest.raises(InputError, match="no token ends a document"):
        load_tokenizer("HuggingFaceTokenizer", tokenizer_model=json_file)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab1. \n\t\x1c'✓"), max_size=60), size=st.integers(1, 9))
def test_long_texts_have_the_same_ids_in_parts(gpt2: BPETokenizer, text: str, size: int) -> None:
    whole = gpt2.encode([text, ""])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "_PART_CHARS", size)
        parts = gpt2.encode([text, ""])
    assert [ids.tolist() for ids in parts] == [ids.tolist() for ids in whole]
