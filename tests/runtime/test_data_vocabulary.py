"""Vocabularies of a corpus: the commonest parts of a Chinese text, which comes back from its ids."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from costmodels.errors import InputError
from runtime.data import load_tokenizer, prepare
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.vocabulary import make_vocabulary

POEM = "白日依山尽，黄河入海流。\n欲穷千里目，更上一层楼。\n山外青山楼外楼。\n"


@pytest.fixture
def poem(tmp_path: Path) -> Path:
    path = tmp_path / "poem.txt"
    path.write_text(POEM, encoding="utf-8")
    return path


def test_characters_are_the_commonest_ones(tmp_path: Path, poem: Path) -> None:
    made = make_vocabulary([poem], tmp_path / "made", "char", 12)
    counts = Counter(POEM)
    expected = sorted(counts, key=lambda one: (-counts[one], one))[:10]
    assert made.vocabulary() == {
        token: number for number, token in enumerate(["[UNK]", "<|endoftext|>", *expected])
    }
    known = "".join(one for one in POEM if one in expected)
    assert made.decode(made.encode([known])[0]) == known
    assert made.encode(["白"])[0].tolist() == [0 if "白" not in expected else expected.index("白") + 2]


@pytest.mark.parametrize(("kind", "size"), [("char", 100), ("bpe", 300)])
def test_a_corpus_comes_back_from_its_token_files(tmp_path: Path, poem: Path, kind: str, size: int) -> None:
    made = make_vocabulary([poem], tmp_path / "made", kind, size)
    again = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path / "made")
    prefix = prepare([poem], tmp_path / "data", again).prefix
    ids = IndexedDataset(prefix).get(0, 0, None).tolist()
    assert ids[-1] == made.eod and made.vocab_size <= size
    assert again.decode(ids[:-1]) == POEM
    if kind == "bpe":
        assert len(ids) < len(POEM.encode())


def test_words_are_parted_by_spaces_and_punctuation(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "one two, two"}\n{"text": ["two three", "one"]}\n')
    made = make_vocabulary([path], tmp_path / "made", "word", 5)
    assert list(made.vocabulary()) and made.vocabulary()["two"] == 2 and made.vocabulary()["one"] == 3
    assert made.vocab_size == 5 and made.encode(["two three four"])[0].tolist() == [2, 0, 0]


def test_what_makes_no_vocabulary_is_refused(tmp_path: Path, poem: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.txt").write_text(" \n")
    cases: list[tuple[Path, str, int, str]] = [
        (tmp_path / "none", "char", 100, "none: no such file"),
        (tmp_path / "pipe", "char", 100, "pipe: is no regular file"),
        (tmp_path / "empty.txt", "char", 100, "empty.txt: holds no text"),
        (tmp_path / "empty.txt", "bpe", 300, "empty.txt: holds no text"),
        (poem, "char", 2, r"--vocab-size 2: expected at least 3, for \[UNK\], <\|endoftext\|> and a"),
        (poem, "bpe", 256, "--vocab-size 256: expected at least 257"),
        (poem, "letters", 100, "--kind 'letters': expected one of char, word, bpe"),
    ]
    for path, kind, size, message in cases:
        with pytest.raises(InputError, match=message):
            make_vocabulary([path], tmp_path / "made", kind, size)
        assert not (tmp_path / "made").exists()
    with pytest.raises(InputError, match=r"--output .*poem.txt: cannot be made"):
        make_vocabulary([poem], poem, "char", 100)
