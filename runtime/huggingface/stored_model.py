"""A stored model (checkpoints or Hugging Face files), read tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from costmodels import ModelSpec
from costmodels.errors import InputError
from costmodels.layers.quantised import quantised_names
from costmodels.paths import expanded
from runtime import checkpoint
from runtime.checkpoint import RUN_FILE
from runtime.checkpoint.base import check_base
from runtime.checkpoint.tensor_store import StoredTensors
from runtime.huggingface.folder_kind import COMPANIONS, checkpoint_in, is_hugging_face
from runtime.huggingface.mapping import EMBEDDING, HEAD, our_shapes
from runtime.huggingface.model_folder import HuggingFaceModel, first_names
from runtime.model.adapters import DOWN, UP, is_adapter
from runtime.model.nf4 import rounded


class ModelFiles(Protocol):
    """The files of a model, in either format."""

    spec: ModelSpec

    @property
    def companions(self) -> Path:
        """Folder with config.json and tokenizer, if there are any."""

    def read_ours(self, name: str) -> Tensor:
        """A whole tensor of ours, without padded entries of the vocabulary."""


class StoredModel:
    """A checkpoint of any layout, from training or `runtime.convert`.

    Args:
        folder: folder of checkpoints, as written by `--save`.
        iteration: the newest when not given.
        verify: compare all files with their checksums first.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """

    def __init__(self, folder: str | Path, iteration: int | None = None, verify: bool = True) -> None:
        self.root = expanded(folder)
        found = checkpoint_in(folder, iteration)
        self.iteration = found
        self.folder = checkpoint.iteration_folder(self.root, found)
        self.where = f"checkpoint {self.folder}"
        if verify:
            checkpoint.verify(self.folder)
        self.spec = checkpoint.read_run(self.folder).model
        self.tensors = StoredTensors(self.folder)
        self.shapes = our_shapes(self.spec)
        if self.spec.lora is not None:
            self.shapes = {name: shape for name, shape in self.shapes.items() if is_adapter(name)}
        self._check()

    @property
    def companions(self) -> Path:
        """Folder with config.json and tokenizer, if there are any."""
        return self.root / COMPANIONS

    def dtype(self, name: str) -> torch.dtype:
        """The stored number format of a tensor."""
        return self.tensors.wholes[name].dtype

    def read_ours(self, name: str) -> Tensor:
        """A whole tensor, without padded entries of the vocabulary."""
        tensor = self.tensors.read(name)
        return tensor[: self.spec.vocab] if name in (EMBEDDING, HEAD) else tensor

    def _check(self) -> None:
        missing = sorted(self.shapes.keys() - self.tensors.wholes.keys())
        if missing:
            raise InputError(
                f"{self.where}: {first_names(missing)} missing, which the model of {RUN_FILE} has"
            )
        for name, shape in self.shapes.items():
            stored = self.tensors.wholes[name].shape
            padded = name in (EMBEDDING, HEAD) and stored[0] >= shape[0] and stored[1:] == tuple(shape[1:])
            if stored != tuple(shape) and not padded:
                raise InputError(
                    f"{self.where}: tensor {name} has the shape {list(stored)}, but by {RUN_FILE} it is "
                    f"{list(shape)}"
                )


class TunedModel:
    """A checkpoint of adapters merged with its base: W + alpha / rank B A for each W.

    Raises:
        InputError: the base is missing or damaged.
    """

    def __init__(self, adapters: StoredModel, verify: bool = True) -> None:
        base = checkpoint.read_run(adapters.folder).base
        assert base is not None
        check_base(adapters.folder, base)
        self.adapters, self.base = adapters, StoredModel(base.folder, base.iteration, verify)
        self.base_folder = base.folder
        self.folder, self.shapes = adapters.folder, self.base.shapes
        self.spec = adapters.spec.model_copy(update={"lora": None, "mtp": self.base.spec.mtp})
        assert adapters.spec.lora is not None
        self.lora, self.quantised = adapters.spec.lora, quantised_names(adapters.spec)

    @property
    def companions(self) -> Path:
        """Folder with config.json and tokenizer, if there are any."""
        return self.adapters.companions

    def dtype(self, name: str) -> torch.dtype:
        """The stored number format of a tensor."""
        return self.base.dtype(name)

    def adapter(self, name: str) -> tuple[Tensor, Tensor] | None:
        """A [rank, inputs] and B [outputs, rank] of a weight; None where it has no adapter."""
        names = [name.removesuffix("weight") + one for one in (DOWN, UP)]
        if not name.endswith(".weight") or names[0] not in self.adapters.shapes:
            return None
        lora_a, lora_b = (self.adapters.read_ours(one).float() for one in names)
        return lora_a, lora_b

    def read_ours(self, name: str) -> Tensor:
        """A whole tensor, without padded entries of the vocabulary; in fp32 if it has an adapter or was
        frozen in 4 bits; then it has the 4-bit values."""
        tensor, found = self.base.read_ours(name), self.adapter(name)
        if name in self.quantised:
            tensor = rounded(tensor)
        if found is None:
            return tensor
        return tensor.float().addmm_(found[1], found[0], alpha=self.lora.scale)


def open_stored(
    folder: str | Path, iteration: int | None = None, verify: bool = True
) -> StoredModel | TunedModel:
    """The model of a folder of checkpoints, with its adapters merged if it has some."""
    stored = StoredModel(folder, iteration, verify)
    return stored if stored.spec.lora is None else TunedModel(stored, verify)


def has_adapters(folder: str | Path, iteration: int | None = None) -> bool:
    """Return whether a folder of checkpoints holds adapters; False without a checkpoint."""
    root = expanded(folder)
    found = checkpoint.iteration_to_load(root, iteration)
    if found is None:
        return False
    return checkpoint.read_run(checkpoint.iteration_folder(root, found)).model.lora is not None


def open_model(folder: str | Path, iteration: int | None = None, verify: bool = True) -> ModelFiles:
    """The model in `folder`: that of an iteration in a folder of checkpoints, or a Hugging Face model.

    Raises `InputError` as `StoredModel` and `HuggingFaceModel` do.
    """
    path = expanded(folder)
    if is_hugging_face(path):
        if iteration is not None:
            raise InputError(f"--ckpt-step {iteration}: {folder} is a Hugging Face model, which has none")
        return HuggingFaceModel(path)
    return open_stored(path, iteration, verify)
