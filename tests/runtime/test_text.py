"""Sources of a run's tokens: blends as they are typed, and the tokenizer of the default corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from costmodels.errors import InputError
from runtime.job.datasets import open_datasets, tokenizer_for
from runtime.settings.training_options import DataOptions
from tests.support.jobs import write_corpus
from tests.support.models import MODELS

SPEC = MODELS["gpt2"].model_copy(update={"vocab": 257, "seq": 16})


@pytest.mark.parametrize(
    "typed", [["1 {a} 3 {b}"], ["1 {a}", "3 {b}"], ["1", "{a}", "3", "{b}"]], ids=["one", "pairs", "words"]
)
def test_a_blend_is_read_however_it_is_split_into_arguments(tmp_path: Path, typed: list[str]) -> None:
    names = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        names[name] = write_corpus(tmp_path / name)
    options = DataOptions(data_path=[text.format(**names) for text in typed], split="90,10,0")
    train = open_datasets(options, SPEC, seed=1, train_samples=8, valid_samples=0).train
    assert train is not None
    assert train.weights == [0.25, 0.75]  # type: ignore[union-attr]


def test_a_prefix_may_hold_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    folder.mkdir()
    options = DataOptions(data_path=[write_corpus(folder)], split="90,10,0")
    datasets = open_datasets(options, SPEC, seed=1, train_samples=4, valid_samples=2)
    assert datasets.train is not None and datasets.valid is not None
    assert datasets.train.batch([0, 3]).shape == (2, SPEC.seq + 1)


def test_the_default_tokenizer_is_gpt2s_where_the_vocabulary_has_room() -> None:
    assert tokenizer_for(DataOptions(), 50257).name == "gpt2"
    assert tokenizer_for(DataOptions(), 50256).name == "bytes"
    with pytest.raises(InputError, match="the tokenizer bytes has 257 entries, but the model's vocabulary"):
        tokenizer_for(DataOptions(), 256)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tokenizer_type": "GPT2BPETokenizer"},
            "gpt2 has 50257 entries, but the model's vocabulary holds 257",
        ),
        ({"vocab_file": "none.json", "merge_file": "none.txt"}, "none"),
    ],
)
def test_a_tokenizer_named_beside_prepared_files_must_fit_the_model(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    options = DataOptions(data_path=[write_corpus(tmp_path)], split="90,10,0", **fields)
    with pytest.raises(InputError, match=message):
        open_datasets(options, SPEC, seed=1, train_samples=4, valid_samples=2)


def test_each_split_may_have_its_own_files_and_the_boundaries_their_token(tmp_path: Path) -> None:
    path = write_corpus(tmp_path)
    options = DataOptions(
        train_data_path=["0.5", path, "0.5", path],
        valid_data_path=[path],
        reset_attention_mask=True,
        tokenizer_type="ByteTokenizer",
    )
    datasets = open_datasets(options, SPEC, seed=1, train_samples=8, valid_samples=4)
    assert datasets.valid is not None and datasets.test is None
    assert datasets.boundaries is not None and datasets.boundaries.eod == 256
    assert not datasets.boundaries.eod_mask_loss
    # The default corpus is prepared with its tokenizer's end of document.
    plain = open_datasets(DataOptions(data_path=[path], split="1"), SPEC, 1, 8, 0)
    assert plain.boundaries is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eod_mask_loss": True, "data_path": ["{}"]}, "need the token that ends a document"),
        ({"train_data_path": ["{}"], "data_path": ["{}"]}, "exclude each other"),
        ({"valid_data_path": ["{}"]}, "need --train-data-path"),
    ],
)
def test_data_options_that_do_not_fit_together(tmp_path: Path, fields: dict, message: str) -> None:
    path = write_corpus(tmp_path)
    fields = {name: [path] if isinstance(value, list) else value for name, value in fields.items()}
    with pytest.raises(InputError, match=message):
        open_datasets(DataOptions(**fields), SPEC, seed=1, train_samples=4, valid_samples=2)
