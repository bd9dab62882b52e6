"""The training data of a run: prepared files, or the standard library of Python."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from costmodels import ModelSpec
from costmodels.errors import InputError
from runtime.data import (
    Datasets,
    Tokenizer,
    build_datasets,
    build_separate_datasets,
    check_vocabulary,
    load_tokenizer,
    stdlib_corpus,
)
from runtime.data.boundaries import Boundaries, check_ends
from runtime.data.record import Record, digest, read_record
from runtime.data.tokenizers import implied_kind
from runtime.huggingface.model_tokenizer import check_same_tokenizer, tokenizer_of_folder
from runtime.settings.training_options import DataOptions


class ModelTokenizer(NamedTuple):
    """The tokenizer of the model that a job trains."""

    place: str
    """The flag that names the folder, and the folder: `--load base`."""
    tokenizer: Tokenizer


def model_tokenizer(load: str | None, model: str | None) -> ModelTokenizer | None:
    """The tokenizer beside the checkpoint that a job loads, or else beside the model; None without one."""
    for flag, folder in (("--load", load), ("--model", model)):
        found = None if folder is None else tokenizer_of_folder(folder)
        if found is not None:
            return ModelTokenizer(f"{flag} {folder}", found)
    return None


def tokenizer_for(options: DataOptions, vocab: int, own: Tokenizer | None = None) -> Tokenizer:
    """The tokenizer of the default corpus: the model's `own`, else GPT-2's if there is room, else bytes.

    Raises `InputError` when the vocabulary of the tokenizer is larger than the model's.
    """
    kind = options.tokenizer_type
    if kind is None:
        kind = implied_kind(options.vocab_file, options.merge_file, options.tokenizer_model)
    if kind is None and own is not None and own.vocab_size <= vocab:
        return own
    kind = kind or ("GPT2BPETokenizer" if vocab >= 50257 else "ByteTokenizer")
    tokenizer = load_tokenizer(kind, options.vocab_file, options.merge_file, options.tokenizer_model)
    if tokenizer.vocab_size > vocab:
        raise InputError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} entries, but the model's vocabulary "
            f"holds {vocab}; give --vocab-size {tokenizer.vocab_size} or another tokenizer"
        )
    return tokenizer


def _words(data_path: list[str]) -> list[str]:
    """The words of a blend; one argument that begins with a weight may have several, as `0.3 PREFIX 0.7
    PREFIX`."""
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
    options: DataOptions,
    spec: ModelSpec,
    seed: int,
    train_samples: int,
    valid_samples: int,
    own: ModelTokenizer | None = None,
) -> Datasets:
    """Training and validation samples of a run, and test samples if there are separate files for them.

    The default corpus is prepared at first use. Prepared files need no tokenizer, unless boundaries of
    documents in a stream matter and no record gives the end-of-document token. A named tokenizer must suit
    the model and agree with the files' records. Data must have the model's `own` tokenizer, if that is known.
    """
    paths, separate = _words(options.data_path), [_words(path) for path in options.split_paths]
    if paths and any(separate):
        raise InputError("--data-path and --train-data-path exclude each other; give one of them")
    if any(separate) and not separate[0]:
        raise InputError("--valid-data-path and --test-data-path need --train-data-path; give it too")
    named = (options.tokenizer_type, options.vocab_file, options.merge_file, options.tokenizer_model)
    is_prepared = bool(paths or separate[0])
    tokenizer = None
    if any(named) or not is_prepared:
        tokenizer = tokenizer_for(options, spec.vocab, own and own.tokenizer)
    if tokenizer is not None and not is_prepared:
        paths = [str(stdlib_corpus(tokenizer))]
    if separate[0]:
        samples = train_samples, valid_samples, valid_samples
        datasets = build_separate_datasets(separate, spec.seq, seed, samples, options.pack_documents)
    else:
        datasets = build_datasets(
            paths,
            options.split,
            spec.seq,
            seed,
            train_samples,
            valid_samples,
            packs=options.pack_documents,
        )
    record = datasets.record
    if tokenizer is not None and record is not None and digest(tokenizer) != record.digest:
        raise InputError(
            f"--tokenizer-type: {tokenizer.name} is named, but the data was prepared with {record}: name "
            "that one, or none to train on its ids all the same"
        )
    used = record or tokenizer
    if own is not None and used is not None:
        check_same_tokenizer(own.place, own.tokenizer, used)
    check_vocabulary(datasets, spec.vocab)
    boundaries = _boundaries(options, datasets, tokenizer or record)
    return replace(datasets, boundaries=boundaries) if boundaries else datasets


def _boundaries(
    options: DataOptions, datasets: Datasets, ends: Tokenizer | Record | None
) -> Boundaries | None:
    """The treatment of boundaries of documents; `ends` gives the end-of-document token of a stream."""
    if options.pack_documents:
        # Padding is stored as prompts are.
        return Boundaries(None, True, True, True, hides_prompts=True)
    if options.heeds_stream and ends is None:
        raise InputError(
            "--reset-attention-mask, --reset-position-ids and --eod-mask-loss need the token that ends a "
            "document: give --tokenizer-type (and its files) of the tokenizer that prepared the data"
        )
    hides = _hides_prompts(datasets)
    if ends is None or not (options.heeds_stream or hides):
        return None
    if options.heeds_stream:
        for indexed in datasets.indexed:
            check_ends(indexed, ends)
    return Boundaries(
        ends.eod,
        options.reset_attention_mask,
        options.reset_position_ids,
        options.eod_mask_loss,
        hides_prompts=hides,
    )


def _hides_prompts(datasets: Datasets) -> bool:
    """Return whether some of the files store prompts that are not predicted."""
    records = map(read_record, datasets.indexed)
    return any(record is not None and record.hides_prompts for record in records)
