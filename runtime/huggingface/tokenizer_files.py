"""A tokenizer written as a tokenizer.json for Hugging Face's libraries."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers as hf

from runtime.data import Tokenizer
from runtime.data.tokenizers import BPETokenizer, ByteTokenizer

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer's files to `folder`; they give the same ids, and name the token that ends a text."""
    model = tokenizer.model if isinstance(tokenizer, BPETokenizer) else _of_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER_FILE).write_text(model.to_str(pretty=True) + "\n", encoding="utf-8")
    end = model.id_to_token(tokenizer.eod)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _of_bytes() -> hf.Tokenizer:
    """`ByteTokenizer` as a byte-pair encoding without pairs."""
    model = hf.Tokenizer(hf.models.BPE(ByteTokenizer().vocabulary(), []))
    model.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = hf.decoders.ByteLevel()
    return model
