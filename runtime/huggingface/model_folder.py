"""The folder of a Hugging Face model: its config.json, and its tensors under this runtime's names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from costmodels import ModelSpec, MultiTokenPrediction
from costmodels.errors import InputError
from costmodels.paths import expanded
from planner.inputs.huggingface.config_file import model_from_hf_config, read_config
from planner.inputs.model import with_mtp
from runtime.huggingface.files import TensorPlace, list_tensors, read_tensor
from runtime.huggingface.folder_kind import CONFIG_FILE
from runtime.huggingface.language_part import FURTHER, language_config, language_tensors
from runtime.huggingface.mapping import (
    EMBEDDING,
    FURTHER_TYPES,
    GPT2_PREFIX,
    STACKED_TYPES,
    Entry,
    Part,
    further_copies,
    mapping,
    our_shapes,
)
from runtime.huggingface.packed_weights import BLOCKS, SCALES, Packed, packed_tensors

LM_HEAD = "lm_head.weight"

SCALE_SUFFIX = "_scale_inv"
"""The suffix of the tensor with the scales of an fp8 matrix, one for each block (DeepSeek-V3)."""

_CONSTANTS = re.compile(r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")
"""Tensors that old versions saved with the weights: masks, and rotary frequencies."""

STACKED = re.compile(r"^model\..*\.mlp\.experts\.gate_up_proj$")
"""Pattern of the name of a tensor with all experts of a layer."""

MXFP4 = "mxfp4"
"""Value of `quant_method` for a model with experts packed in four bits."""

MOST_NAMES = 3
"""Most tensors that one line names."""


class HuggingFaceModel:
    """A folder with a config.json and safetensors files with the tensors of its architecture.

    Args:
        folder: the model's folder.
        seq: tokens of a training sample, for `spec`; see
            `planner.inputs.huggingface.config_file.model_from_hf_config`.

    Raises:
        InputError: there is no such model; a tensor is missing, has another shape or is unknown; or the model
            is quantised in another way than fp8 blocks or MXFP4.
    """

    def __init__(self, folder: str | Path, seq: int | None = None) -> None:
        self.folder = expanded(folder)
        self.where = f"model {str(self.folder)!r}"
        self.spec: ModelSpec = model_from_hf_config(self.folder, seq)
        whole = read_config(self.folder / CONFIG_FILE)
        self.config: dict[str, Any] = language_config(whole)
        """The configuration of the language model, by itself."""
        self.tensors, beside = list_tensors(self.folder), list[str]()
        if self.config is not whole:
            self.tensors, beside = language_tensors(self.tensors)
        self.entries = entries_of(self.config, self.spec, any(map(STACKED.search, self.tensors)))
        self.shapes = our_shapes(self.spec)
        self.block = _block_of(self.config, self.where)
        self.packed: dict[str, Packed] = {}
        self.copies: set[str] = set()
        """Names of copies of embedding and head in MTP layers."""
        if _method_of(self.config) == MXFP4:
            self.packed = packed_tensors(self.tensors)
            for name, packed in self.packed.items():
                del self.tensors[name + BLOCKS], self.tensors[name + SCALES]
                dtype = torch.bfloat16 if packed.is_whole else None
                self.tensors[name] = TensorPlace(packed.blocks.file, name, packed.shape, dtype)
        self.prefix = GPT2_PREFIX
        """The beginning of names in the files of a GPT-2; empty where it was saved without its head."""
        if self.config["model_type"] == "gpt2" and "wte.weight" in self.tensors:
            self.prefix = ""
            self.tensors = {
                name if name == LM_HEAD else GPT2_PREFIX + name: found for name, found in self.tensors.items()
            }
        self._find_further()
        self.left_out = self._check() + beside
        """Names of tensors that are no part of the model here, as those of multi-token prediction layers."""
        self.places: dict[str, list[tuple[Entry, Part]]] = defaultdict(list)
        """Places of each of our tensors in the files, expert by expert."""
        for entry in self.entries:
            for part in entry.parts:
                self.places[part.ours].append((entry, part))

    @property
    def companions(self) -> Path:
        """Folder with config.json and tokenizer."""
        return self.folder

    @property
    def stores_tied_head(self) -> bool:
        """True if the head is stored although it is tied to the embedding."""
        return self.spec.tied and LM_HEAD in self.tensors

    def dtype(self, entry: Entry) -> torch.dtype:
        """Number format of the result of `read`; bf16 for a tensor in fp8 blocks."""
        dtype = self.tensors[entry.theirs].dtype
        assert dtype is not None
        return torch.bfloat16 if dtype.itemsize == 1 else dtype

    def read(self, entry: Entry) -> Tensor:
        """A copy of a Hugging Face tensor, with blocks multiplied by their scales."""
        if entry.theirs in self.packed:
            return self.packed[entry.theirs].read()
        tensor = read_tensor(self.tensors[entry.theirs])
        if tensor.element_size() > 1:
            return tensor
        factors = read_tensor(self.tensors[entry.theirs + SCALE_SUFFIX]).float()
        for dim, size in enumerate(self.block):
            factors = factors.repeat_interleave(size, dim).narrow(dim, 0, tensor.shape[dim])
        return (tensor.float() * factors).bfloat16()

    def read_part(self, entry: Entry, part: Part) -> Tensor:
        """This runtime's tensor, or one of its experts, from a part of a Hugging Face tensor."""
        return entry.take(self.read(entry), part, self.shapes)

    def read_ours(self, name: str) -> Tensor:
        """A whole tensor of this runtime, without padded entries of the vocabulary."""
        parts = [self.read_part(entry, part) for entry, part in self.places[name]]
        return parts[0] if self.places[name][0][1].expert is None else torch.stack(parts)

    def _find_further(self) -> None:
        """Include the MTP layers if all of them are present and share the model's embedding and head."""
        if str(self.config["model_type"]) not in FURTHER_TYPES or not self.spec.mtp_layers:
            return
        spec = with_mtp(self.spec, MultiTokenPrediction(depths=self.spec.mtp_layers))
        entries = entries_of(self.config, spec)
        if {entry.theirs for entry in entries} - self.tensors.keys():
            return
        names = {entry.parts[0].ours: entry.theirs for entry in entries}
        self.copies = {copy for copy in further_copies(spec) if copy in self.tensors}
        for copy in self.copies:
            one, other = self.tensors[copy], self.tensors[names[further_copies(spec)[copy]]]
            if one.shape != other.shape or not torch.equal(read_tensor(one), read_tensor(other)):
                self.copies = set()
                return
        self.spec, self.entries, self.shapes = spec, entries, our_shapes(spec)

    def _check(self) -> list[str]:
        """Check the tensors against the architecture; returns the names of tensors outside of it."""
        kind = f"a {self.config['model_type']} of this config.json"
        wanted = {entry.theirs for entry in self.entries}
        missing = sorted(wanted - self.tensors.keys())
        if missing:
            raise InputError(f"{self.where}: {first_names(missing)} missing, which {kind} has")
        for entry in self.entries:
            self._check_tensor(entry.theirs, entry.shape(self.shapes), self.tensors[entry.theirs])
        if self.block:
            wanted |= {name + SCALE_SUFFIX for name in wanted}
        left = sorted(self.tensors.keys() - wanted - self.copies - ({LM_HEAD} if self.spec.tied else set()))
        further = self.config.get("num_nextn_predict_layers")
        count = further if isinstance(further, int) else 0
        known = tuple(f"model.layers.{self.spec.layers + number}." for number in range(count))
        known_kinds = (_CONSTANTS, FURTHER)
        foreign = [
            name
            for name in left
            if not name.startswith(known) and not any(kind.search(name) for kind in known_kinds)
        ]
        if foreign:
            raise InputError(f"{self.where}: no place for {first_names(foreign)} in {kind}")
        if self.stores_tied_head:
            embedding = next(entry.theirs for entry in self.entries if entry.parts[0].ours == EMBEDDING)
            if not torch.equal(*(read_tensor(self.tensors[name]) for name in (LM_HEAD, embedding))):
                raise InputError(
                    f"{self.where}: {LM_HEAD} is not the embedding, but config.json ties them; set its "
                    "tie_word_embeddings to false"
                )
        return left

    def _check_tensor(self, name: str, shape: tuple[int, ...], found: TensorPlace) -> None:
        if found.shape != shape:
            raise InputError(
                f"{self.where}: tensor {name} has the shape {list(found.shape)}, but by config.json it is "
                f"{list(shape)}"
            )
        if found.dtype is None or (found.dtype.itemsize == 1 and not self._has_factors(name, shape)):
            raise InputError(
                f"{self.where}: tensor {name} is quantised; give the model in bf16, fp16 or fp32"
            )

    def _has_factors(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether there is a scale for each block of a matrix of fp8."""
        factors = self.tensors.get(name + SCALE_SUFFIX)
        if factors is None or len(shape) != len(self.block):
            return False
        blocks = tuple(-(-length // size) for length, size in zip(shape, self.block, strict=True))
        return factors.shape == blocks and factors.dtype is not None


def entries_of(config: dict[str, Any], spec: ModelSpec, is_stacked: bool = False) -> list[Entry]:
    """The tensors of a model with this config.json, stored as by transformers or with stacked experts."""
    model_type = str(config["model_type"])
    interleaved = config.get("rope_interleave", True) is not False
    return mapping(model_type, spec, interleaved, is_stacked and model_type in STACKED_TYPES)


def _block_of(config: dict[str, Any], where: str) -> tuple[int, ...]:
    """Rows and columns of the fp8 blocks that share a scale; empty without quantisation."""
    quantised, method = config.get("quantization_config"), _method_of(config)
    if quantised is None or method == MXFP4:
        return ()
    block = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
    if method != "fp8" or not isinstance(block, list) or not _are_sizes(block):
        raise InputError(
            f"{where}: quantised by {method!r}; give the model in bf16, fp16 or fp32, in blocks of fp8 or in "
            "MXFP4"
        )
    return tuple(block)


def _method_of(config: dict[str, Any]) -> object:
    """The method that quantised the model; None for a model without quantisation."""
    quantised = config.get("quantization_config")
    return quantised.get("quant_method") if isinstance(quantised, dict) else quantised


def _are_sizes(block: list[object]) -> bool:
    return len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def first_names(names: Sequence[str]) -> str:
    """The first of `names`, and the number of further ones."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
