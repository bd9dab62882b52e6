"""Generated tokens: those of transformers, with and without a cache, on one rank and on several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from costmodels import Router
from costmodels.errors import InputError
from runtime.data.tokenizers import ByteTokenizer, gpt2_tokenizer
from runtime.generation.generator import Generator, Sampling
from runtime.generation.stage import Split
from runtime.generation.text import Stream, Text, text_of
from runtime.huggingface.folder_kind import COMPANIONS
from runtime.huggingface.stored_model import StoredModel, open_model
from tests.support import stored_models as model_files
from tests.support.hugging_face import MODELS, hugging_face, skip_unless_there
from tests.support.models import FORMS
from tests.support.models import MODELS as OUR_MODELS
from tests.support.worker_pool import WorkerPool

PROMPTS = [[3, 5, 7], [1, 2, 3, 4, 5, 6, 7, 8], [90]]
"""Prompts of different lengths, so that each row has its own positions."""

TOKENS = 12


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    skip_unless_there(name)
    theirs, _ = hugging_face(name, tmp_path)
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    ours = Generator(tmp_path, text=Text(ByteTokenizer()))
    cached = ours.continue_ids(PROMPTS, TOKENS, ignore_end=True)
    expected = []
    for prompt in PROMPTS:
        output = theirs.generate(  # type: ignore[operator]
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(output[0, len(prompt) :].tolist())
    assert cached == expected
    assert len({token for row in cached for token in row}) > TOKENS / 2
    assert ours.continue_ids(PROMPTS, TOKENS, ignore_end=True, cached=False) == cached
    # The likeliest token says nothing of logits that are scaled or bounded, which drawn tokens depend on.
    with torch.no_grad():
        last = [theirs(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]  # type: ignore[operator]
    logits = ours._plain_step(PROMPTS)([[], [], []])
    torch.testing.assert_close(logits, torch.stack(last), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints for each kind of model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("gpt2", "llama", "deepseek", "mixtral"):
        model_files.write_checkpoint(OUR_MODELS[name], folder / name)
    one_group = OUR_MODELS["llama"].model_copy(update={"kv_heads": 1})
    model_files.write_checkpoint(one_group, folder / "one_group")
    return folder


@pytest.mark.parametrize("name", ["gpt2", "deepseek", "sinks", "capped", "delta"])
def test_a_cache_gives_the_logits_of_whole_texts(name: str, tmp_path: Path) -> None:
    """Whatever the rows become, and for the next batch too, whose texts are shorter."""
    model_files.write_checkpoint((OUR_MODELS | FORMS)[name], tmp_path)
    generator = Generator(tmp_path, text=Text(ByteTokenizer()))
    texts = torch.randint(0, 250, (3, 14), generator=torch.Generator().manual_seed(0)).tolist()
    for prompts in (PROMPTS, [[4, 2], [6]]):
        grown = [[row[:made] for row in texts[: len(prompts)]] for made in range(15)]
        plain, cached = generator._plain_step(prompts), generator._cached_step(prompts, 14)
        expected = {made: plain(grown[made]) for made in (0, 1, 2, 13, 14)}
        for made, found in enumerate(map(cached, grown)):
            if made in expected:
                torch.testing.assert_close(found, expected[made], rtol=1e-3, atol=1e-3)


def test_experts_take_in_all_tokens_of_a_text(tmp_path: Path) -> None:
    """A limited capacity is of training: what it drops depends on tokens that come later."""
    texts = []
    for factor in (0.0, 0.25):
        router = Router(capacity_factor=factor)
        spec = OUR_MODELS["mixtral"].model_copy(update={"router": router})
        model_files.write_checkpoint(spec, tmp_path / str(factor))
        texts.append(model_files.generated(str(tmp_path / str(factor)), PROMPTS, TOKENS, Split()))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("gpt2", Split(pipeline_parallel=2)),
        # Ranks share the only head of keys and values.
        ("one_group", Split(tensor_parallel=2)),
        ("deepseek", Split(tensor_parallel=2)),
        ("mixtral", Split(tensor_parallel=2, pipeline_parallel=2, expert_parallel=2)),
    ],
)
def test_ranks_generate_what_one_does(pool: WorkerPool, checkpoints: Path, name: str, split: Split) -> None:
    folder = str(checkpoints / name)
    expected = model_files.generated(folder, PROMPTS, TOKENS, Split())
    found = pool.run(model_files.generated, split.world_size, folder, PROMPTS, TOKENS, split)
    assert found == [expected] * split.world_size


def test_a_text_does_not_depend_on_those_beside_it(checkpoints: Path) -> None:
    generator = Generator(checkpoints / "llama", text=Text(ByteTokenizer()))
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=5)
    together = generator.continue_ids(PROMPTS, TOKENS, sampling)
    assert generator.continue_ids(PROMPTS[:1], TOKENS, sampling) == together[:1]
    assert generator.continue_ids(PROMPTS, TOKENS, sampling, cached=False) == together
    other = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=6)
    assert generator.continue_ids(PROMPTS, TOKENS, other) != together


def test_rows_of_a_batch_draw_for_themselves_and_again_the_same() -> None:
    sampling, logits = Sampling(temperature=1.0, seed=3), torch.zeros(4, 1000)
    drawn = [sampling.choose(logits, sampling.generators(4)).tolist() for _ in range(2)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 4


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -1.0], [0.0, 3.0, 3.0, 1.0, -2.0]])
    assert Sampling(temperature=0.0, top_k=1).greedy and not Sampling(top_k=3).greedy
    plain = Sampling(temperature=0.5).probabilities(logits)
    assert torch.allclose(plain, (logits * 2).softmax(-1))
    two = Sampling(top_k=2).probabilities(logits)
    assert torch.allclose(two[0, :2], logits[0, :2].softmax(-1)) and not two[0, 2:].any()
    # 0.64 and 0.24 reach 0.7: the token that reaches it stays.
    nucleus = Sampling(top_p=0.7).probabilities(logits)
    assert (nucleus > 0).tolist() == [[True, True, False, False, False], [False, True, True, False, False]]
    # The first of equal tokens, on every machine.
    alike = Sampling(top_p=0.5).probabilities(torch.zeros(256).unsqueeze(0))
    assert alike[0, :128].all() and not alike[0, 128:].any()
    # The likeliest stays however small the sum.
    assert (Sampling(top_p=1e-9).probabilities(logits) > 0).sum(-1).tolist() == [1, 1]
    rows = logits[:1].expand(4000, -1)
    generators = [torch.Generator().manual_seed(1)] * 4000
    drawn = Sampling(top_k=3).choose(rows, generators).bincount(minlength=5) / 4000
    assert torch.allclose(drawn, Sampling(top_k=3).probabilities(logits)[0], atol=0.03)


def test_each_row_has_its_own_likeliest_tokens() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [10.0, 13.0, 12.0, 11.0]])
    kept = Sampling(top_k=2).probabilities(logits) > 0
    assert kept.tolist() == [[True, True, False, False], [False, True, True, False]]


def test_a_text_ends_where_the_model_ends_it(checkpoints: Path) -> None:
    folder = checkpoints / "gpt2"
    [[*_, third, _, _]] = Generator(folder, text=Text(ByteTokenizer())).continue_ids([[65]], 5)
    (folder / COMPANIONS / "generation_config.json").write_text(json.dumps({"eos_token_id": [third, 999]}))
    generator = Generator(folder)
    assert generator.text.ends == {256, third}
    seen: list[list[int | None]] = []
    short, long = generator.complete(["A", "Bcd"], 5, on_tokens=seen.append)
    assert short.ended == "end" and short.tokens[-1] == third and len(short.tokens) <= 3
    assert short.text == generator.text.decode(short.tokens[:-1])
    assert long.ended == "length" and len(long.tokens) == 5
    assert [tokens[1] for tokens in seen] == long.tokens
    assert [tokens[0] for tokens in seen] == short.tokens + [None] * (5 - len(short.tokens))
    (folder / COMPANIONS / "generation_config.json").unlink()


def test_texts_are_shown_character_by_character() -> None:
    for tokenizer in (ByteTokenizer(), gpt2_tokenizer()):
        text = Text(tokenizer)
        stream = Stream(text)
        words = "déjà vu 日本 🙂!"
        pieces = [stream.add(token) for token in text.encode(words)]
        assert "".join(pieces) == words and not any("\ufffd" in piece for piece in pieces)
    assert Text(ByteTokenizer()).encode("") == [256]


def test_prompts_that_cannot_be_continued_are_refused(checkpoints: Path) -> None:
    spec = OUR_MODELS["gpt2"]
    generator = Generator(checkpoints / "gpt2", text=Text(ByteTokenizer()))
    with pytest.raises(
        InputError, match=r"has 32 positions; give at most 28 new tokens, or a shorter prompt"
    ):
        generator.continue_ids([[1] * 4], spec.max_positions)
    assert len(generator.continue_ids([[1] * 4], 28, ignore_end=True)[0]) == 28
    with pytest.raises(InputError, match=r"token 256 of a prompt: the model's vocabulary holds 250"):
        generator.complete([""])
    with pytest.raises(InputError, match="a prompt without tokens"):
        generator.continue_ids([[1], []], 5)


def test_a_hugging_face_model_has_no_iterations(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"--ckpt-step 3: .* is a Hugging Face model, which has none"):
        open_model(tmp_path, 3)


def test_a_model_without_a_tokenizer_asks_for_one(checkpoints: Path, tmp_path: Path) -> None:
    model_files.write_checkpoint(OUR_MODELS["gpt2"], tmp_path)
    for file in (tmp_path / COMPANIONS).iterdir():
        file.unlink()
    files = StoredModel(tmp_path)
    with pytest.raises(InputError, match=r"no tokenizer in .*: give --tokenizer-type and its files"):
        text_of(files)
    assert text_of(files, "ByteTokenizer").encode("A") == [65]


def test_a_tokenizer_is_found_in_the_files_of_any_version(tmp_path: Path) -> None:
    spec = OUR_MODELS["gpt2"].model_copy(
        update={"vocab": 50257, "layers": 1, "hidden": 8, "head_dim": 2, "ffn": 8}
    )
    model_files.write_checkpoint(spec, tmp_path)
    files, folder = StoredModel(tmp_path), tmp_path / COMPANIONS
    assert text_of(files).encode("A") == [65]
    # A post-processor that puts a token before each text, as Llama's does.
    described = json.loads((folder / "tokenizer.json").read_text())
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert text_of(files).encode("A") == [7, 65]
    assert text_of(files, special_tokens=False).encode("A") == [65]
    # The first ones of GPT-2 have no tokenizer.json.
    (folder / "tokenizer.json").unlink()
    tokenizer = gpt2_tokenizer()
    (folder / "vocab.json").write_text(json.dumps(tokenizer.model.get_vocab()))
    model = json.loads(tokenizer.model.to_str())["model"]
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    assert text_of(files).encode(" world") == tokenizer.encode([" world"])[0].tolist()


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("gpt2", Split(tensor_parallel=3), "3"),
        ("gpt2", Split(pipeline_parallel=5), "pipeline_parallel 5: parity-gpt2 has 4 layers; give at most"),
        ("mixtral", Split(tensor_parallel=2, expert_parallel=4), "expert_parallel 4 must divide tensor_par"),
    ],
)
def test_a_split_that_the_model_does_not_allow_is_refused(
    checkpoints: Path, name: str, split: Split, message: str
) -> None:
    # Before ranks talk to each other.
    with pytest.raises(InputError, match=message):
        model_files.generated(str(checkpoints / name), PROMPTS, 1, split)
