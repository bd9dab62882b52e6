"""Whole documents in shared samples: nothing is lost, and losses are those of documents by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from costmodels.errors import InputError
from runtime.data import build_datasets, prepare
from runtime.data.boundaries import Boundaries
from runtime.data.description import describe
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.packing import PackedDataset, packed_rows
from runtime.data.tokenizers import ByteTokenizer
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks.documents import EOD, losses_of_rows
from tests.support.worker_pool import WorkerPool

PACKED = Boundaries(EOD, True, True, True, hides_prompts=True)


@given(some.lists(some.integers(0, 40), max_size=60), some.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_every_document_has_room_in_one_row(lengths: list[int], capacity: int) -> None:
    rows = packed_rows(lengths, capacity)
    assert sorted(number for row in rows for number in row) == [n for n, one in enumerate(lengths) if one]
    fills = [sum(min(lengths[number], capacity) for number in row) for row in rows]
    assert all(fill <= capacity for fill in fills)
    # No two rows would fit into one.
    assert all(one + other > capacity for one, other in zip(sorted(fills), sorted(fills)[1:], strict=False))


def corpus(folder: Path) -> Path:
    pairs = [("ask " * n, "tell" * (n % 4 + 1)) for n in range(9)]
    lines = [json.dumps({"prompt": prompt, "response": answer}) for prompt, answer in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    summary = prepare(
        [folder / "pairs.jsonl"], folder / "sft", ByteTokenizer(), "response", prompt_key="prompt"
    )
    return summary.prefix


def test_prompts_are_stored_and_not_predicted(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    pair, eod = IndexedDataset(prefix), ByteTokenizer().eod
    third = pair.get(2, 0, None)
    assert bytes((~third[third < 0]).tolist()) == b"ask ask "
    assert bytes(third[third >= 0][:-1].tolist()) == b"telltelltell" and third[-1] == eod
    found = describe(prefix)
    assert (found.smallest, found.largest, found.ended) == (ord(" "), eod, 9)
    assert found.first_text == "tell"
    datasets = build_datasets([str(prefix)], "1,0,0", 52, 1, 5, packs=True)
    assert isinstance(datasets.train, PackedDataset)
    rows = datasets.train.batch(range(len(datasets.train)))
    assert rows.shape[1] == 53 and (rows == eod).sum() == 9
    again = datasets.train.batch(range(len(rows), 2 * len(rows)))
    assert sorted(map(tuple, rows)) == sorted(map(tuple, again)) and (rows != again).any()
    with pytest.raises(InputError, match="--prompt-key response: is one of --json-keys too"):
        prepare([tmp_path / "pairs.jsonl"], "x", ByteTokenizer(), "response", prompt_key="response")


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_loss_of_packed_documents_is_that_of_each_by_itself(pool: WorkerPool, name: str) -> None:
    spec = MODELS[name]
    random = np.random.default_rng(5)
    documents = []
    for length in random.integers(4, 14, 12):
        tokens = random.integers(6, spec.vocab, length)
        tokens[: length // 2] = ~tokens[: length // 2]
        documents.append([*tokens.tolist(), EOD])

    def row(parts: list[list[int]]) -> list[int]:
        filled = [token for part in parts for token in part]
        return filled + [~EOD] * (spec.seq + 1 - len(filled))

    packed = packed_rows([len(one) for one in documents], spec.seq + 1)
    rows = [row([documents[number] for number in numbers]) for numbers in packed]
    rows += [row([])] * (-len(rows) % 2)
    assert len(rows) <= len(documents) // 2
    alone = [row([one]) for one in documents]
    [expected] = pool.run(losses_of_rows, 1, spec, parse_layout("gbs=12", spec), PACKED, alone)
    for text in ("", "dp=2,zero=1", "cp=2"):
        layout = parse_layout(f"gbs={len(rows)},{text}", spec)
        found = pool.run(losses_of_rows, layout.world_size, spec, layout, PACKED, rows)[0]
        # Losses of two steps and an evaluation, and gradient norms.
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=text)
