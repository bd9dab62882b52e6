"""Attention, positions and losses within documents: Megatron's rules, and the same for every layout."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from costmodels.errors import InputError
from runtime.data.boundaries import Boundaries, check_ends
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.indexed_writer import IndexedWriter
from runtime.data.tokenizers import ByteTokenizer
from runtime.model.transformer import Transformer
from runtime.parallel.documents import Documents, check_boundaries, document_mask, document_starts
from runtime.parallel.initialisation import initialise
from tests.support.layouts import deep_enough, parse_layout
from tests.support.models import FORMS, MODELS
from tests.support.ranks import documents as work
from tests.support.ranks.documents import EOD
from tests.support.worker_pool import WorkerPool

ALL = Boundaries(EOD, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)


def megatrons(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The mask of attention, and positions, by the loop over ends of Megatron's GPTDataset."""
    seq = len(tokens)
    mask, positions = np.tril(np.ones((seq, seq), bool)), np.arange(seq)
    previous = 0
    for end in [at for at, token in enumerate(tokens) if token == EOD]:
        mask[end + 1 :, : end + 1] = False
        positions[end + 1 :] -= end + 1 - previous
        previous = end + 1
    return mask, positions


def test_masks_and_positions_are_megatrons() -> None:
    random = np.random.default_rng(1)
    rows = random.integers(3, 9, (40, 12))
    rows[0], rows[1] = EOD, 0
    starts = document_starts(torch.from_numpy(rows), EOD)
    masks = document_mask(starts, torch.arange(12), 12, torch.float32)
    for row, start, mask in zip(rows.tolist(), starts, masks, strict=True):
        expected, positions = megatrons(row)
        assert (torch.arange(12) - start).tolist() == positions.tolist()
        assert np.array_equal(mask[0].isfinite().numpy(), expected)
        assert mask[0][torch.from_numpy(expected)].eq(0).all()


@pytest.mark.parametrize("name", ["gpt2", "llama", "deepseek", "chunks", "windows", "capped", "sinks"])
def test_a_document_is_computed_as_if_it_were_alone(name: str) -> None:
    spec = {**MODELS, **FORMS}[name]
    layout = parse_layout("gbs=8", spec)
    model = Transformer(spec, spec.vocab)
    initialise(model, spec, 1)
    tokens = torch.from_numpy(work.samples(spec, layout)[:, :-1])
    documents = Documents(ALL, spec, layout, 0, torch.device("cpu"))
    documents.start_batch(document_starts(tokens, EOD))
    for number in (1, 3, 7):
        row = tokens[number : number + 1]
        documents.enter(model, number)
        together = model(row)[0]
        ends = [0, *(row[0] == EOD).nonzero()[:, 0].add(1).tolist(), spec.seq]
        alone = Transformer(spec, spec.vocab)
        alone.load_state_dict(model.state_dict())
        parts = [alone(row[:, a:b])[0] for a, b in pairwise(ends) if b > a]
        torch.testing.assert_close(together, torch.cat(parts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt2", "tp=2,sequence_parallel=true,dp=2,recompute=selective"),
        ("gpt2", "pp=2,schedule=zbv,recompute=full"),
        ("llama", "cp=2,context_parallel_form=all_gather,recompute=full"),
        ("llama", "cp=2,context_parallel_form=all_to_all,zero=3"),
        # One microbatch in each step, whose documents are not those of the step before.
        ("llama", "dp=2,gbs=2"),
    ],
)
def test_layouts_agree_on_the_losses(pool: WorkerPool, name: str, text: str) -> None:
    spec = deep_enough(text, MODELS[name])
    layout = parse_layout(text, spec)
    alone = parse_layout(f"gbs={layout.global_batch_size}", spec)
    expected = pool.run(work.losses, 1, spec, alone, ALL, 2)[0]
    assert pool.run(work.losses, layout.world_size, spec, layout, ALL, 2)[0] == pytest.approx(
        expected, rel=2e-6
    )
    plain = pool.run(work.losses, 1, spec, alone, Boundaries(EOD), 1)[0]
    assert plain[0] != pytest.approx(expected[0], rel=1e-5)


def test_each_flag_of_documents_matters_without_the_others(pool: WorkerPool) -> None:
    spec = MODELS["gpt2"]
    one = parse_layout("gbs=4", spec)
    flags: list[dict[str, bool]] = [
        *({}, {"reset_attention_mask": True}, {"reset_position_ids": True}, {"eod_mask_loss": True}),
        {"reset_attention_mask": True, "reset_position_ids": True},
    ]
    losses = [pool.run(work.losses, 1, spec, one, Boundaries(EOD, **given), 1)[0] for given in flags]
    for at in range(2):
        assert len({round(loss[at], 5) for loss in losses}) == len(flags), losses


def test_the_ring_is_refused_in_one_line() -> None:
    layout = parse_layout("cp=2,context_parallel_form=ring", MODELS["llama"])
    with pytest.raises(InputError, match=r"--reset-attention-mask: .* pin all_gather or all_to_all"):
        check_boundaries(ALL, layout)
    check_boundaries(Boundaries(EOD, reset_position_ids=True, eod_mask_loss=True), layout)


def test_files_without_ends_are_refused(tmp_path) -> None:
    for name, end in (("with", [256]), ("without", [])):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            writer.add_document([])
            writer.add_document([1, 2, *end])
    check_ends(IndexedDataset(tmp_path / "with"), ByteTokenizer())
    with pytest.raises(InputError, match=r"without: none of its first 1 documents ends with 256.*--append"):
        check_ends(IndexedDataset(tmp_path / "without"), ByteTokenizer())
