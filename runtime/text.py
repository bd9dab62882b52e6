"""The tokens that a run trains on: prepared files, or the standard library of Python."""

from __future__ import annotations

from costmodels import ModelSpec
from costmodels.errors import InputError
from runtime.data import (
    Datasets,
    Tokenizer,
    build_datasets,
    check_vocabulary,
    load_tokenizer,
    stdlib_corpus,
)
from runtime.options import DataOptions


def tokenizer_for(options: DataOptions, vocab: int) -> Tokenizer:
    """The tokenizer of the default corpus: GPT-2's if the model has room for it, else bytes.

    Raises `InputError` when the vocabulary of the tokenizer is larger than the model's.
    """
    kind = options.tokenizer_type
    if kind is None:
        named = options.vocab_file or options.merge_file
        kind = "HuggingFaceTokenizer" if options.tokenizer_model else "GPT2BPETokenizer" if named else None
    kind = kind or ("GPT2BPETokenizer" if vocab >= 50257 else "ByteTokenizer")
    tokenizer = load_tokenizer(kind, options.vocab_file, options.merge_file, options.tokenizer_model)
    if tokenizer.vocab_size > vocab:
        raise InputError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} entries, but the model's vocabulary "
            f"holds {vocab}; give --vocab-size {tokenizer.vocab_size} or another tokenizer"
        )
    return tokenizer


def _words(data_path: list[str]) -> list[str]:
    """The words of a blend: one argument may hold several, `0.3 PREFIX 0.7 PREFIX`, if a weight is first."""
    words = []
    for text in data_path:
        parts = text.split()
        words += parts if len(parts) > 1 and _is_number(parts[0]) else [text]
    return words


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def open_datasets(
    options: DataOptions, spec: ModelSpec, seed: int, train_samples: int, valid_samples: int
) -> Datasets:
    """Training and validation samples of a run; the default corpus is prepared at first use.

    Prepared files need no tokenizer; one that is named all the same must fit the model.
    """
    named = (options.tokenizer_type, options.vocab_file, options.merge_file, options.tokenizer_model)
    tokenizer = tokenizer_for(options, spec.vocab) if any(named) or not options.data_path else None
    paths = _words(options.data_path)
    if tokenizer is not None and not paths:
        paths = [str(stdlib_corpus(tokenizer))]
    datasets = build_datasets(paths, options.split, spec.seq, seed, train_samples, valid_samples)
    check_vocabulary(datasets, spec.vocab)
    return datasets
