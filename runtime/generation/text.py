"""Conversion of prompts to token ids and of ids to text, with the model's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from costmodels.errors import InputError
from costmodels.files import read_text
from planner.inputs.huggingface.config_file import LARGEST_CONFIG
from runtime.data import Tokenizer, load_tokenizer
from runtime.data.tokenizers import BPETokenizer, implied_kind
from runtime.huggingface.model_tokenizer import tokenizer_of_folder
from runtime.huggingface.stored_model import ModelFiles

REPLACEMENT = "\ufffd"
"""The character for bytes that are not yet a complete character."""


class Text:
    """A tokenizer for generation.

    Args:
        tokenizer: tokenizer of the model.
        ends: ids that end a text, besides the tokenizer's own.
        special_tokens: True to put the special tokens of the tokenizer's file before a text, as transformers
            does.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int] = (), special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.ends = frozenset((tokenizer.eod, *ends))
        self.special_tokens = special_tokens

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt; an empty prompt becomes the end-of-text token."""
        if isinstance(self.tokenizer, BPETokenizer) and self.special_tokens:
            ids = self.tokenizer.model.encode(text).ids
        else:
            ids = [int(token) for token in self.tokenizer.encode([text])[0]]
        return list(ids) or [self.tokenizer.eod]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; padding ids of the model's vocabulary have no text."""
        return self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])


class Stream:
    """The growing text of a row, in pieces of complete characters."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.ids: list[int] = []
        self.shown = ""

    def add(self, token: int) -> str:
        """The text that the next token adds to the shown text."""
        self.ids.append(token)
        whole = self.text.decode(self.ids)
        if whole.endswith(REPLACEMENT):
            return ""
        new, self.shown = whole[len(self.shown) :], whole
        return new


def text_of(
    files: ModelFiles,
    kind: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    special_tokens: bool = True,
) -> Text:
    """The named tokenizer, or else the one beside a model.

    Raises `InputError` where there is none.
    """
    folder = files.companions
    kind = kind or implied_kind(vocab_file, merge_file, tokenizer_model)
    tokenizer = (
        tokenizer_of_folder(folder)
        if kind is None
        else load_tokenizer(kind, vocab_file, merge_file, tokenizer_model)
    )
    if tokenizer is None:
        raise InputError(
            f"no tokenizer in {folder}: give --tokenizer-type and its files, or --tokenizer-model "
            "PATH-to-tokenizer.json"
        )
    return Text(tokenizer, _ends(folder, files.spec.vocab), special_tokens)


def _ends(folder: Path, vocab: int) -> list[int]:
    """Ids that end a text, from generation_config.json or config.json; chat models have several."""
    for name in ("generation_config.json", "config.json"):
        ends = _read_key(folder / name, "eos_token_id")
        found = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
        if found:
            return [end for end in found if end < vocab]
    return []


def _read_key(path: Path, key: str) -> Any:
    try:
        content = json.loads(read_text(path, LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError):
        # Beside the weights, it is of no consequence.
        return None
    return content.get(key) if isinstance(content, dict) else None
