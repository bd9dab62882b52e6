"""Checkpoints of models with initial weights, and what ranks make of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from costmodels import Layout, ModelSpec
from runtime import checkpoint
from runtime.checkpoint.tensor_store import Piece, Whole, write_tensors
from runtime.data.tokenizers import ByteTokenizer
from runtime.generation.generator import Generator
from runtime.generation.stage import Split
from runtime.generation.text import Text
from runtime.huggingface.folder_kind import COMPANIONS
from runtime.huggingface.mapping import HEAD
from runtime.huggingface.tokenizer_files import write_tokenizer
from runtime.job import initial_state
from runtime.model.transformer import Transformer
from runtime.parallel.initialisation import initialise
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.ranks.training import CPU, batch_of

STD = 0.3
"""Standard deviation of initial weights: large enough for the likeliest tokens to differ."""


def initial_model(spec: ModelSpec) -> Transformer:
    """A model with weights that its seed gives, and norms that differ, so that none stands for another."""
    model = Transformer(spec, spec.padded_vocab(1))
    initialise(model, spec, 1, STD)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.2 * torch.rand(parameter.shape, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    return model


def write_checkpoint(spec: ModelSpec, folder: Path, iteration: int = 0) -> Transformer:
    """Write the initial weights of a model as a run of bytes would; returns the model."""
    model = initial_model(spec)
    tensors = {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if not (spec.tied and name == HEAD)
    }
    target = checkpoint.partial_folder(folder, iteration)
    write_tensors(
        target,
        {name: Whole(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()},
        [
            Piece(name, (0,) * tensor.dim(), tuple(tensor.shape), partial(torch.clone, tensor))
            for name, tensor in tensors.items()
        ],
    )
    run = {"iteration": iteration, "weights_only": True, "model": spec.model_dump(mode="json")}
    checkpoint.publish(folder, iteration, run, checkpoint.file_records(target))
    write_tokenizer(folder / COMPANIONS, ByteTokenizer())
    return model


def loss_with_loaded_weights(spec: ModelSpec, layout: Layout, folder: str) -> float:
    """Loss of a batch on this rank's trainer, whose weights come from a checkpoint."""
    trainer = Trainer(spec, layout, TrainingOptions(), CPU)
    initial_state.load_weights(folder, trainer, spec, 0)
    return trainer.evaluate(batch_of(spec, layout, 0)[trainer.rows])


def save_untrained(spec: ModelSpec, layout: Layout, folder: str) -> None:
    """Save the initial weights of a layout, which are those of every layout, with its optimizer state."""
    checkpoint.save(folder, Trainer(spec, layout, TrainingOptions(), CPU), spec, {})


def generated(folder: str, prompts: Sequence[Sequence[int]], tokens: int, split: Split) -> list[list[int]]:
    """The likeliest continuations of `prompts`, on this rank."""
    generator = Generator(folder, split=split, text=Text(ByteTokenizer()))
    return generator.continue_ids(prompts, tokens, ignore_end=True)
