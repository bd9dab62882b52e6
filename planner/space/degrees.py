"""Degrees of freedom of a layout as arrays: those of one, or of a grid of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from costmodels.spec.layout import V_SCHEDULES, Layout
from costmodels.spec.table import ARRAY_FIELDS, BOOLEANS, Bools, Ints, code_of


@dataclass(frozen=True)
class Degrees:
    """The degrees of freedom of one layout or of a grid of them; named as the fields of `Layout`.

    Words are codes, as in the columns of `LayoutTable`.
    """

    tensor_parallel: Ints
    sequence_parallel: Bools
    pipeline_parallel: Ints
    virtual_pipeline_parallel: Ints
    context_parallel: Ints
    context_parallel_form: Ints
    expert_parallel: Ints
    expert_tensor_parallel: Ints
    data_parallel: Ints
    zero_stage: Ints
    zero_replicas: Ints
    schedule: Ints
    micro_batch_size: Ints
    batch: Ints
    """Sequences of one step that are asked for: exactly, or at most."""
    batch_is_maximum: Bools
    recompute: Ints
    recompute_modules: Ints
    recompute_method: Ints
    recompute_num_layers: Ints
    offload_activations: Bools
    offload_optimizer: Bools
    optimizer: Ints
    entries: Ints
    """Entries of `layers_per_stage`."""
    layers: Ints
    """Layers that the stages hold together."""
    deepest: Ints
    """Layers of the largest stage."""

    @cached_property
    def global_batch_size(self) -> Ints:
        """Sequences of one step: the given ones, or the most under the maximum that the schedule can run.

        Interleaved schedules need multiples of pp micro batches. Where not even that many fit, the multiple
        of the smaller unit (or the maximum) shows what is missing.
        """
        unit = self.micro_batch_size * self.data_parallel
        if not self.batch_is_maximum.any():
            return np.broadcast_to(self.batch, unit.shape)
        whole = self.batch // unit * unit
        free = np.isin(self.schedule, [code_of("schedule", kind) for kind in ("1f1b", *V_SCHEDULES)])
        rounds = np.where(free, unit, unit * self.pipeline_parallel)
        fewer = np.where(whole, whole, self.batch)
        return np.where(rounds <= self.batch, self.batch // rounds * rounds, fewer)

    @property
    def stages(self) -> Ints:
        """Pipeline stages: ranks times chunks."""
        return self.pipeline_parallel * self.virtual_pipeline_parallel

    @property
    def micro_batches(self) -> Ints:
        """Whole micro batches of each data-parallel rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    @property
    def replicas(self) -> Ints:
        """Ranks over which ZeRO may split."""
        return self.data_parallel * self.context_parallel

    @property
    def expert_replicas(self) -> Ints:
        """Ranks that hold the same share of the same experts."""
        devices = self.tensor_parallel * self.replicas
        return np.maximum(devices // (self.expert_parallel * self.expert_tensor_parallel), 1)

    @classmethod
    def of(cls, layout: Layout) -> Degrees:
        """The degrees of one layout."""
        split = layout.layers_per_stage
        own = [name for name in ARRAY_FIELDS if name not in ("split", "global_batch_size")]
        codes = {name: code_of(name, getattr(layout, name)) for name in own}
        arrays = {name: np.asarray(code) for name, code in codes.items()}
        for name in BOOLEANS:
            arrays[name] = arrays[name].astype(bool)
        return cls(
            **arrays,
            batch=np.asarray(layout.global_batch_size),
            batch_is_maximum=np.asarray(False),
            entries=np.asarray(len(split)),
            layers=np.asarray(sum(split)),
            deepest=np.asarray(max(split)),
        )
