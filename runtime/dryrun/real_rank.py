"""One rank of a job trained on one real device, with a process group that does nothing for the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from costmodels import Layout, ModelSpec
from runtime.dryrun.experts import even_load
from runtime.dryrun.run import fake_process_group, isolated_pipeline
from runtime.job.attention_choice import use_attention_alone
from runtime.settings.training_options import TrainingOptions
from runtime.train import stages
from runtime.train.trainer import Trainer


@contextmanager
def real_rank(
    spec: ModelSpec, layout: Layout, rank: int, options: TrainingOptions, device: torch.device
) -> Iterator[Trainer]:
    """The trainer of a rank of `layout`, with collectives that leave their buffers unchanged.

    Its weights are zero, as drawing those of a large model takes minutes and their values do not matter.
    Experts get equal shares of tokens, independent of the routers.
    """
    with ExitStack() as stack:
        stack.enter_context(fake_process_group(layout.world_size, rank))
        stack.enter_context(isolated_pipeline())
        stack.enter_context(even_load(spec))
        stack.enter_context(patch.object(stages, "initialise", _zeros))
        use_attention_alone(spec, layout, device)
        yield Trainer(spec, layout, options, device)


def _zeros(model: Any, *_: Any) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
