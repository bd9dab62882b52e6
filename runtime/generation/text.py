"""Prompts to token ids and ids to text, with the tokenizer that a model was trained with."""

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
"""The character that stands for bytes that are no character yet."""


class Text:
    """A tokenizer as generation needs it.

    Args:
        tokenizer: of the model.
        ends: ids that end a text, besides the tokenizer's own.
        special_tokens: put before a text what the tokenizer's file says, as transformers does.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int] = (), special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.ends = frozenset((tokenizer.eod, *ends))
        self.special_tokens = special_tokens

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt; one without any begins after the end of another text."""
        if isinstance(self.tokenizer, BPETokenizer) and self.special_tokens:
            ids = self.tokenizer.model.encode(text).ids
        else:
            ids = [int(token) for token in self.tokenizer.encode([text])[0]]
        return list(ids) or [self.tokenizer.eod]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; those that only fill up the model's vocabulary have none."""
        return self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])


class Stream:
    """The text of a row as it grows: each piece when its characters are complete."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.ids: list[int] = []
        self.shown = ""

    def add(self, token: int) -> str:
        """The text that the next token adds to what is shown."""
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
    """The tokenizer that is named, or else the one that lies beside a model.

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
    """Ids that end a text by generation_config.json or config.json: chat models have several."""
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
