"""Vocabulary sizes of tokenizers, by their usual names."""

from __future__ import annotations

import re

TYPES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary size by Megatron-LM's `--tokenizer-type`, for types with a fixed size
(megatron/training/tokenizer)."""

_NAMES = (
    (r"llama-?_?(?:3|3\.[123])(?![0-9])|llama3", 128256),
    (r"llama-?_?4", 202048),
    (r"code-?llama", 32016),
    (r"llama-?_?2|llama2|llama-(?:7|13|30|33|65|70)b|tinyllama|vicuna", 32000),
    (r"mixtral-8x22b|mistral-7b-(?:instruct-)?v0\.3", 32768),
    (r"mistral-nemo|mistral-small-(?:24|3)|tekken", 131072),
    (r"mistral-7b|mixtral-8x7b", 32000),
    (r"qwen1\.5|qwen2(?!\.5)|qwen2\.5|qwen3(?!\.5|-next)", 151936),
    (r"gpt-oss|o200k", 201088),
    (r"gpt-?2|gpt2", 50257),
    (r"gpt-neox|pythia|20b[-_]tokenizer", 50432),
    (r"smollm2|cosmo2", 49152),
    (r"deepseek-(?:v3|r1)", 129280),
    (r"deepseek-v2", 102400),
    (r"gemma-?[23]?", 256000),
    (r"cl100k", 100277),
)
"""Vocabulary size by a pattern of a tokenizer's name or path, from the config.json of its models."""


_USUAL = (
    *("tokenizer", "tokenizers", "model", "vocab", "bpe", "gpt", "llama", "hf", "json", "txt", "path"),
    *("sentencepiece", "spm", "sp", "merges", "merged", "bin", "file"),
)
"""Words of files that hold the usual tokenizer of their type."""


def vocabulary_of_type(kind: str, file: str | None) -> int | None:
    """The vocabulary size of a type of tokenizers with the given file.

    It is unknown where the name of the file, or of its folder of one tokenizer, is that of another tokenizer.
    """
    parts = (file or "").lower().rstrip("/").split("/")
    names = parts[-1:] + [each for each in parts[-2:-1] if "tokenizer" in each]
    words = [word for name in names for word in re.findall(r"[a-z]+", name)]
    own = "$" not in parts[-1] and any(word not in _USUAL for word in words)
    return None if own else TYPES.get(kind)


def vocabulary_of(*names: str) -> int | None:
    """The vocabulary size of a tokenizer, by the first of its names that is known; None where none is."""
    for name in names:
        for pattern, size in _NAMES:
            if re.search(rf"(?<![a-z0-9]){pattern}", name.lower()):
                return size
    return None
