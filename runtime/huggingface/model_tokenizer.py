"""The tokenizer of a model, if its files are beside the model's."""

from __future__ import annotations

from pathlib import Path

from costmodels.errors import InputError
from costmodels.paths import expanded, is_file
from planner.inputs.huggingface.hub import cached_folder, hub_model
from runtime.data import Tokenizer, load_tokenizer
from runtime.data.record import Record, digest, record_of, recorded_tokenizer
from runtime.huggingface.folder_kind import COMPANIONS
from runtime.huggingface.tokenizer_files import TOKENIZER_FILE

GPT2_FILES = "vocab.json", "merges.txt"


def tokenizer_of_folder(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face model or of checkpoints, by its folder, a file in it, or its id.

    For an id, only the Hub's cache is used; nothing is fetched. None if there is no tokenizer. Raises
    `InputError` if its files are broken.
    """
    model = hub_model(folder)
    place = expanded(folder) if model is None else cached_folder(model)
    if place is None:
        return None
    if is_file(place):
        place = place.parent
    for beside in (place, place / COMPANIONS):
        if is_file(beside / TOKENIZER_FILE):
            return load_tokenizer("HuggingFaceTokenizer", tokenizer_model=beside)
        vocab, merges = (beside / name for name in GPT2_FILES)
        if is_file(vocab) and is_file(merges):
            return load_tokenizer("GPT2BPETokenizer", vocab, merges)
    return None


def named_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of the model that `--model` names; raises `InputError` if it has none."""
    found = tokenizer_of_folder(folder)
    if found is None and hub_model(folder) is not None:
        return load_tokenizer("HuggingFaceTokenizer", tokenizer_model=folder)
    if found is None:
        raise InputError(
            f"--model {folder}: no {TOKENIZER_FILE} there; give a folder of a Hugging Face model or of "
            "checkpoints, or --tokenizer-model PATH-to-tokenizer.json"
        )
    return found


def check_same_tokenizer(place: str, model: Tokenizer, data: Tokenizer | Record) -> None:
    """Raise `InputError` unless every id of the data's tokenizer has the same meaning in the model's.

    Args:
        place: where the model's tokenizer is, such as `--load base`.
    """
    record = data if isinstance(data, Record) else record_of(data)
    # The token that ends a document may differ: chat models end turns by another token of the same
    # vocabulary.
    if digest(model, record.eod) == record.digest:
        return
    try:
        other = recorded_tokenizer(data) if isinstance(data, Record) else data
        own = model.vocabulary()
        if all(own.get(token) == number for token, number in other.vocabulary().items()):
            return
    except InputError:
        pass  # The files are gone: all that is known is that the vocabularies are not the same.
    raise InputError(
        f"{place} has the tokenizer {model.name} ({model.vocab_size} ids), but the data was prepared with "
        f"{record}: its ids mean other text to the model; prepare it again with planner data prepare --model "
        f"{place.split(maxsplit=1)[-1]}"
    )
