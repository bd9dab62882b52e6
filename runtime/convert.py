"""Conversion of Hugging Face models to checkpoints of this runtime, and back.

Examples:
    >>> from runtime import convert
    >>> convert.from_hugging_face("Llama-3.1-8B", "llama")  # doctest: +SKIP
    >>> convert.to_hugging_face("llama", "exported", dtype="bf16")  # doctest: +SKIP

Both write tensor after tensor, so that memory holds a few of them, and a folder that appears when it is
whole. There and back again gives the same tensors to the bit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from costmodels import ModelSpec
from costmodels.errors import InputError
from costmodels.paths import is_file, is_folder
from planner.inputs.huggingface.keys import Config
from runtime import checkpoint
from runtime.checkpoint.manifest import reader_lock
from runtime.checkpoint.tensor_store import Piece, Whole, write_tensors
from runtime.data import load_tokenizer
from runtime.huggingface.companions import (
    Names,
    copy_companions,
    read_companions,
    write_companions,
    write_config,
)
from runtime.huggingface.configs import config_for, differences, with_dtype
from runtime.huggingface.files import PlannedTensor, file_size, write_files
from runtime.huggingface.folder_kind import COMPANIONS
from runtime.huggingface.language_part import ONLY_PARTS
from runtime.huggingface.mapping import (
    EMBEDDING,
    FURTHER_TYPES,
    GPT2_PREFIX,
    HEAD,
    Entry,
    Part,
    further_copies,
)
from runtime.huggingface.model_folder import LM_HEAD, HuggingFaceModel, entries_of
from runtime.huggingface.new_folder import new_folder
from runtime.huggingface.peft_adapter import write_adapter
from runtime.huggingface.stored_model import StoredModel, TunedModel, open_stored
from runtime.huggingface.tokenizer_files import TOKENIZER_FILE
from runtime.model.number_formats import WEIGHT_DTYPES

MAX_SHARD_SIZE = "5GB"

EXPERT_BIAS = "router.expert_bias"
FURTHER = "mtp."
"""Prefix of the names of MTP modules in this runtime."""

LAYER = re.compile(r"model\.layers\.\d+\.")


class Conversion(NamedTuple):
    """The result of a conversion."""

    folder: Path
    spec: ModelSpec
    tensors: int
    bytes: int
    """Bytes of the written tensors."""
    left_out: list[str]
    """Names of tensors that the runtime's model does not have."""


def from_hugging_face(
    folder: str | Path, output: str | Path, dtype: str | None = None, seq: int | None = None
) -> Conversion:
    """Turn a Hugging Face model into a checkpoint that `--load` takes, at iteration 0 and without optimizer.

    Args:
        folder: folder with config.json and one or several safetensors files.
        output: new folder of checkpoints; config.json, tokenizer and licence go to its folder `huggingface`.
        dtype: `fp32`, `bf16` or `fp16`; the number format of each tensor stays when not given.
        seq: tokens of a training sample that the checkpoint states; training may choose another.

    Raises:
        InputError: the model's architecture is not trained here, tensors are missing, left over or of a wrong
            shape, or `output` exists.
    """
    target, number_format = Path(output), _dtype(dtype)
    model = HuggingFaceModel(folder, seq)
    wholes = _wholes(model, number_format)
    with new_folder(target, "--output") as root:
        tensors = checkpoint.partial_folder(root, 0)
        write_tensors(tensors, wholes, list(_pieces(model, wholes)))
        run = {
            "iteration": 0,
            "weights_only": True,
            "consumed_samples": 0,
            "model": model.spec.model_dump(mode="json"),
        }
        checkpoint.publish(root, 0, run, checkpoint.file_records(tensors))
        names = Names(prefix=model.prefix, stores_tied_head=model.stores_tied_head)
        if model.config["model_type"] not in ONLY_PARTS:
            write_companions(root / COMPANIONS, _kept_config(model), names)
        copy_companions(model.folder, root / COMPANIONS)
    size = sum(torch.Size(whole.shape).numel() * whole.dtype.itemsize for whole in wholes.values())
    return Conversion(target, model.spec, len(wholes), size, model.left_out)


def to_hugging_face(
    folder: str | Path,
    output: str | Path,
    iteration: int | None = None,
    dtype: str | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> Conversion:
    """Turn a checkpoint of any layout into a Hugging Face model; adapters are merged.

    Args:
        folder: folder of checkpoints, as written by `--save`.
        output: new folder.
        iteration: the newest when not given.
        dtype: `fp32`, `bf16` or `fp16`; the number format of each tensor stays when not given.
        max_shard_size: largest file, such as `5GB`.

    Raises:
        InputError: there is no checkpoint; it is damaged; its model has no Hugging Face architecture; or
            `output` exists.
    """
    target, number_format, largest = Path(output), _dtype(dtype), file_size(max_shard_size)
    stored = open_stored(folder, iteration)
    config, names, is_carried = _config_of(stored)
    planned = list(_planned(stored, config, names, number_format))
    if not is_carried or number_format is not None or {"dtype", "torch_dtype"} & config.keys():
        config = with_dtype(config, _main_format(planned))
    with reader_lock(stored.folder), new_folder(target, "--output") as root:
        write_files(root, planned, largest)
        write_config(root, config)
        if is_folder(stored.companions):
            copy_companions(stored.companions, root)
    known = {part.ours for entry in entries_of(config, stored.spec) for part in entry.parts}
    left_out = [name for name in stored.shapes if name.startswith(FURTHER) and name not in known]
    return Conversion(target, stored.spec, len(planned), sum(one.bytes for one in planned), left_out)


def to_peft(
    folder: str | Path, output: str | Path, iteration: int | None = None, dtype: str | None = None
) -> Conversion:
    """Turn the adapters of a checkpoint into a folder that Hugging Face's peft reads.

    Args:
        folder: folder of checkpoints of a run with `--lora-rank`.
        output: new folder.
        iteration: the newest when not given.
        dtype: `fp32` (when not given), `bf16` or `fp16`.

    Raises:
        InputError: as `to_hugging_face`; or the checkpoint has no adapters, or their base is missing.
    """
    target, number_format, stored = Path(output), _dtype(dtype), open_stored(folder, iteration)
    if not isinstance(stored, TunedModel):
        raise InputError(f"{stored.where} has no adapters; it is a model")
    config, _, _ = _config_of(stored)
    with reader_lock(stored.folder), new_folder(target, "--output") as root:
        tensors = write_adapter(root, stored, config, number_format)
        if is_folder(stored.companions):
            copy_companions(stored.companions, root)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return Conversion(target, stored.adapters.spec, len(tensors), size, [])


def _config_of(stored: StoredModel | TunedModel) -> tuple[Config, Names, bool]:
    """config.json of a model, the names in its files, and True if both were stored with the checkpoint."""
    carried = read_companions(stored.companions)
    if carried is not None and not differences(stored.spec, carried.spec):
        config = dict(carried.config)
        if stored.spec.mtp_depths and config["model_type"] in FURTHER_TYPES:
            config["num_nextn_predict_layers"] = stored.spec.mtp_depths
        return config, carried.names, True
    return config_for(stored.spec) | _ends(stored), Names(), carried is not None


def _ends(stored: StoredModel | TunedModel) -> Config:
    """The keys of a config.json for the end-of-text token, from the model's tokenizer."""
    end = None
    if is_file(stored.companions / TOKENIZER_FILE):
        end = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=stored.companions).eod
    return {"bos_token_id": end, "eos_token_id": end}


def _dtype(word: str | None) -> torch.dtype | None:
    if word is not None and word not in WEIGHT_DTYPES:
        raise InputError(f"--dtype {word}: expected {', '.join(WEIGHT_DTYPES)}")
    return None if word is None else WEIGHT_DTYPES[word]


def _format_of(name: str, stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Number format of one of this runtime's tensors in the output; biases of experts are always fp32."""
    return stored if wanted is None or name.endswith(EXPERT_BIAS) else wanted


def _wholes(model: HuggingFaceModel, wanted: torch.dtype | None) -> dict[str, Whole]:
    """This runtime's tensors, with the padding that suits up to 128 tensor-parallel ranks."""
    wholes = {}
    for name, places in model.places.items():
        stored = model.dtype(places[0][0])
        for entry, _ in places:
            stored = torch.promote_types(stored, model.dtype(entry))
        shape = tuple(model.shapes[name])
        if name in (EMBEDDING, HEAD):
            shape = (model.spec.padded_vocab(1), *shape[1:])
        wholes[name] = Whole(shape, _format_of(name, stored, wanted))
    return wholes


def _pieces(model: HuggingFaceModel, wholes: dict[str, Whole]) -> Iterator[Piece]:
    """Pieces that fill this runtime's tensors: Hugging Face tensors or parts of them, and zeros for
    padding."""
    for name, places in model.places.items():
        whole, shape = wholes[name], tuple(model.shapes[name])

        def read(entry: Entry, part: Part, dtype: torch.dtype = whole.dtype) -> Tensor:
            tensor = model.read_part(entry, part).to(dtype)
            return (tensor if part.expert is None else tensor.unsqueeze(0)).contiguous()

        for entry, part in places:
            first, sizes = (0, shape) if part.expert is None else (part.expert, (1, *shape[1:]))
            start = (first, *(0 for _ in shape[1:]))
            yield Piece(name, start, sizes, partial(read, entry, part))
        padding = whole.shape[0] - shape[0]
        if padding:
            zeros = partial(torch.zeros, padding, *shape[1:], dtype=whole.dtype)
            yield Piece(name, (shape[0], *(0 for _ in shape[1:])), (padding, *shape[1:]), zeros)


def _kept_config(model: HuggingFaceModel) -> Config:
    """config.json without features that the checkpoint does not have: fp8 blocks, MTP layers."""
    config = dict(model.config)
    if config.pop("quantization_config", None) is not None:
        config = with_dtype(config, torch.bfloat16)
    if "num_nextn_predict_layers" in config and any(LAYER.match(name) for name in model.left_out):
        config["num_nextn_predict_layers"] = 0
    return config


def _planned(
    stored: StoredModel | TunedModel, config: Config, names: Names, wanted: torch.dtype | None
) -> Iterator[PlannedTensor]:
    """The tensors of the Hugging Face model made from a checkpoint."""
    # Neighbours in the mapping need the same tensor of ours, that of all experts.
    read_ours = lru_cache(maxsize=1)(stored.read_ours)

    def read_part(part: Part) -> Tensor:
        whole = read_ours(part.ours)
        return whole if part.expert is None else whole[part.expert]

    def read(entry: Entry, dtype: torch.dtype) -> Tensor:
        return entry.join(read_part).to(dtype)

    for entry in entries_of(config, stored.spec):
        ours = entry.parts[0].ours
        dtype = _format_of(ours, stored.dtype(ours), wanted)
        name = entry.theirs.removeprefix(GPT2_PREFIX)
        name = names.prefix + name if name != entry.theirs else name
        planned = PlannedTensor(name, entry.shape(stored.shapes), dtype, partial(read, entry, dtype))
        yield planned
        if ours == EMBEDDING and stored.spec.tied and names.stores_tied_head:
            yield planned._replace(name=LM_HEAD)
        if config["model_type"] in FURTHER_TYPES:
            for copy, source in further_copies(stored.spec).items():
                if source == ours:
                    yield planned._replace(name=copy)


def _main_format(tensors: list[PlannedTensor]) -> torch.dtype:
    """The number format of most of the bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.bytes
    return sizes.most_common(1)[0][0]
