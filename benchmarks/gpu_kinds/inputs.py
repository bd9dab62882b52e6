"""The inputs of the jobs: configurations, tokens, and a Hugging Face model. The same on every machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_kinds.kinds import read_models
from runtime.data import load_tokenizer
from runtime.data.indexed_writer import IndexedWriter
from runtime.data.record import record_of

SEED = 20261127

DOCUMENTS, ANSWERS = 40, 160
"""Numbers of documents and answers, more than all steps together read."""

TOKENS_OF_A_DOCUMENT = 1000


def write_inputs(folder: Path) -> dict[str, Path]:
    """Write all inputs below `folder`; returns their paths by the names that commands use."""
    places = {name: folder / name for name in ("models", "data", "base")}
    for place in places.values():
        place.mkdir(parents=True)
    models = read_models()
    for name, config in models.items():
        (places["models"] / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    vocab = models["llama"]["vocab_size"]
    _write_tokens(places["data"], vocab)
    _write_base(places["base"], models["llama"])
    return places


def _write_tokens(folder: Path, vocab: int) -> None:
    """Write documents with a few frequent tokens, so that losses fall within a few steps, and prompts with
    answers.

    Tokens of a prompt are stored as complements: the model reads them but does not predict them.
    """
    # This generator's stream changes with no version of numpy.
    random = np.random.RandomState(SEED)

    def draw(count: int) -> npt.NDArray[np.int64]:
        return np.minimum(random.zipf(1.3, count) - 1, vocab - 1).astype(np.int64)

    with IndexedWriter(folder / "tokens", np.uint16) as writer:
        for _ in range(DOCUMENTS):
            writer.add_document(draw(TOKENS_OF_A_DOCUMENT))
    # A record says that ids of prompts are complements; the byte tokenizer's is of fewer ids than there are.
    record = replace(record_of(load_tokenizer("ByteTokenizer")), vocab_size=vocab, hides_prompts=True)
    with IndexedWriter(folder / "answers", np.int32, record) as writer:
        for _ in range(ANSWERS):
            prompt, answer = draw(random.randint(4, 40)), draw(random.randint(20, 200))
            writer.add_document(np.concatenate([~prompt, answer]).astype(np.int32))


def _write_base(folder: Path, config: dict[str, Any]) -> None:
    """Write a Hugging Face folder of a Llama with random weights."""
    from safetensors.numpy import save_file

    random = np.random.RandomState(SEED)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, pairs = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (heads, hidden),
            f"{layer}.self_attn.k_proj.weight": (pairs, hidden),
            f"{layer}.self_attn.v_proj.weight": (pairs, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (0.02 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    whole = config | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
