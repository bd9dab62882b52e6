"""Whole documents in shared samples: nothing is lost, and losses are those of documents by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as some

from costmodels import ModelSpec
from costmodels.errors import InputError
from runtime.data import build_datasets, load_tokenizer, prepare
from runtime.data.description import describe
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.indexed_writer import IndexedWriter
from runtime.data.packing import PackedDataset, packed_rows
from runtime.data.tokenizers import ByteTokenizer
from runtime.model.transformer import Transformer
from runtime.parallel.initialisation import initialise
from runtime.settings.training_options import TrainingOptions
from tests.support.gradients import check_gradients
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, MODELS
from tests.support.multi_token import logits_by_depth
from tests.support.ranks.documents import of_packed
from tests.support.worker_pool import WorkerPool


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


TURNS = ("<|im_start|>", "<|im_end|>")


def chats(folder: Path) -> tuple[Path, list[list[int]]]:
    """Conversations of two turns by a template that ends each turn with the tokenizer's end of a document.

    Returns the prefix of their file, and the ids of each, those of the first question as their complement.
    """
    words = [f"w{number}" for number in range(60)]
    model = hf.Tokenizer(hf.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="w0"))
    model.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(list(TURNS))
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": TURNS[1]}))
    begin, end = TURNS
    random = np.random.default_rng(5)
    lines: list[str] = []
    ids: list[list[int]] = []
    for sizes in random.integers(1, 3, (8, 4)):
        said = [" ".join(f"w{one}" for one in random.integers(0, 60, size)) for size in sizes]
        asked, told, again, last = said
        # The first answer of one conversation is too early to be told from two tokens before it.
        prompt = f"{begin} {asked} {end} {begin}" if lines else begin
        response = f"{told} {end} {begin} {again} {end} {begin} {last} {end}"
        lines.append(json.dumps({"prompt": prompt, "response": response}))
        ids.append(
            [~one for one in model.encode(prompt).ids] + list(model.encode(response).ids),
        )
    (folder / "chats.jsonl").write_text("\n".join(lines))
    tokenizer = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=folder)
    assert tokenizer.eod == model.token_to_id(end)
    summary = prepare(
        [folder / "chats.jsonl"],
        folder / "chats",
        tokenizer,
        "response",
        append_eod=False,
        prompt_key="prompt",
    )
    return summary.prefix, ids


def loss_alone(spec: ModelSpec, conversations: list[list[int]]) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss over all answers of a model that reads each conversation by itself, and its gradients.

    These have the losses of MTP in them, where the model predicts some.
    """
    model = Transformer(spec, spec.vocab)
    initialise(model, spec, TrainingOptions().seed, TrainingOptions().init_method_std)
    totals, predicted = torch.zeros(1 + spec.mtp_depths), torch.zeros(1 + spec.mtp_depths)
    for ids in conversations:
        tokens = torch.tensor([~one if one < 0 else one for one in ids])
        model.place(torch.arange(len(ids) - 1))
        every = logits_by_depth(model, spec, tokens[None]) if spec.mtp else [model(tokens[None, :-1])]
        losses, counts = [], []
        for depth, logits in enumerate(every):
            answers = torch.tensor(ids)[1 + depth :] >= 0
            wanted = tokens[1 + depth :][answers]
            losses.append(F.cross_entropy(logits[0][answers], wanted, reduction="sum"))
            counts.append(len(wanted))
        totals, predicted = totals + torch.stack(losses), predicted + torch.tensor(counts)
    means = totals / predicted
    objective = means[0] + spec.mtp.loss_factor * means[1:].mean() if spec.mtp else means[0]
    objective.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return means[0].item(), gradients


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("gpt2", ("", "pp=2,schedule=zbv")),
        ("llama", ("", "dp=2,zero=3", "cp=2,context_parallel_form=all_to_all,tp=2")),
        ("chunks", ("", "compiled", "cp=2,context_parallel_form=all_gather", "pp=2")),
        ("chunks", ("cp=2,context_parallel_form=all_to_all,recompute=selective",)),
        ("sinks", ("cp=2,context_parallel_form=all_gather",)),
        ("capped", ("", "cp=2,context_parallel_form=all_gather")),
    ],
)
def test_packed_chats_are_trained_as_each_by_itself(
    pool: WorkerPool, tmp_path: Path, name: str, texts: tuple[str, ...]
) -> None:
    spec = {**MODELS, **FORMS}[name]
    prefix, conversations = chats(tmp_path)
    packed = build_datasets([str(prefix)], "1,0,0", spec.seq, 1, 8, packs=True).train
    assert isinstance(packed, PackedDataset) and len(packed) == 4
    rows, starts = packed.batch(range(4)), packed.starts(range(4))
    expected, gradients = loss_alone(spec, conversations)
    for text in texts:
        compiled = text == "compiled"
        layout = parse_layout("gbs=4," + ("" if compiled else text), spec)
        by_rank = pool.run(of_packed, layout.world_size, spec, layout, rows, starts, compiled)
        for losses, found in by_rank:
            assert losses[0] == pytest.approx(expected, rel=3e-7), text
            assert losses[1] < losses[0]
            # Without the entries that fill a vocabulary up.
            table = gradients["embedding.tokens.weight"]
            own = {key: one[: len(gradients.get(key, table))] for key, one in found.items()}
            check_gradients(spec, own, gradients)
        assert set(gradients) <= {key for _, found in by_rank for key in found}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["llama", "further-tied"])
def test_a_batch_without_answers_has_a_loss_of_zero_and_no_gradient(pool: WorkerPool, name: str) -> None:
    spec = {**MODELS, **FORMS}[name]
    prompts, starts = np.full((4, spec.seq + 1), ~3), np.zeros((4, spec.seq + 1), np.int64)
    [(losses, found)] = pool.run(of_packed, 1, spec, parse_layout("gbs=4", spec), prompts, starts)
    assert losses == [0.0, 0.0]
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["further", "further-tied"])
def test_packed_chats_predict_no_further_token_of_another(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    spec = FORMS[name]
    prefix, conversations = chats(tmp_path)
    packed = build_datasets([str(prefix)], "1,0,0", spec.seq, 1, 8, packs=True).train
    assert isinstance(packed, PackedDataset)
    rows, starts = packed.batch(range(4)), packed.starts(range(4))
    expected, gradients = loss_alone(spec, conversations)
    [(losses, found)] = pool.run(of_packed, 1, spec, parse_layout("gbs=4", spec), rows, starts)
    # Not the loss after the step: biases of experts go by all tokens, padding too.
    assert losses[0] == pytest.approx(expected, rel=3e-7)
    table = gradients["embedding.tokens.weight"]
    check_gradients(
        spec, {key: one[: len(gradients.get(key, table))] for key, one in found.items()}, gradients
    )


def test_documents_end_where_they_end_in_the_file(tmp_path: Path) -> None:
    # Documents of several sequences, of none, and longer than a sample; 9 ends one in a stream.
    documents: list[list[list[int]]] = [[[1, 9, 2], [3]], [[]], [[4] * 12], [[5, 9], [9, 6, 9]], [[7]]]
    with IndexedWriter(tmp_path / "pair", np.uint16) as writer:
        for document in documents:
            tokens = np.array([one for part in document for one in part])
            lengths = np.array([len(part) for part in document if part], np.int64)
            writer.add_documents(tokens, lengths, np.array([len(lengths)]))
    data = PackedDataset(IndexedDataset(tmp_path / "pair"), range(6), seq=9, seed=0)
    rows = {
        tuple(row): list(begin)
        for row, begin in zip(data.batch(range(2)), data.starts(range(2)), strict=True)
    }
    assert rows == {
        (4,) * 10: [0] * 10,
        (5, 9, 9, 6, 9, 1, 9, 2, 3, 7): [0] * 5 + [5] * 4 + [9],
    }


def test_rows_are_shuffled_anew_in_each_epoch_as_by_the_next_seed(tmp_path: Path) -> None:
    tokens = np.arange(20)
    with IndexedWriter(tmp_path / "pair", np.uint16) as writer:
        writer.add_documents(tokens, np.full(20, 1, np.int64), np.ones(20, np.int64))
    indexed = IndexedDataset(tmp_path / "pair")
    data, next_seed = (PackedDataset(indexed, range(20), seq=1, seed=seed) for seed in (5, 6))
    first, second = (data.batch(range(start, start + 10)) for start in (0, 10))
    assert sorted(first.flatten()) == sorted(second.flatten()) == tokens.tolist()
    assert first.tolist() != second.tolist() == next_seed.batch(range(10)).tolist()
