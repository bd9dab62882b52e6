"""Degrees of freedom of a layout as arrays: those of one, or of a grid of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.layout import Layout
from costmodels.table import ARRAY_FIELDS, BOOLEANS, Bools, Ints, code_of


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
    global_batch_size: Ints
    """Sequences of one step; the maximum itself where not even one micro batch per rank fits under it."""
    recompute: Ints
    recompute_modules: Ints
    recompute_method: Ints
    recompute_num_layers: Ints
    offload_activations: Bools
    offload_optimizer: Bools
    entries: Ints
    """Entries of `layers_per_stage`."""
    layers: Ints
    """Layers that the stages hold together."""
    deepest: Ints
    """Layers of the largest stage."""

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

    @classmethod
    def of(cls, layout: Layout) -> Degrees:
        """The degrees of one layout."""
        split = layout.layers_per_stage
        codes = {name: code_of(name, getattr(layout, name)) for name in ARRAY_FIELDS if name != "split"}
        arrays = {name: np.asarray(code) for name, code in codes.items()}
        for name in BOOLEANS:
            arrays[name] = arrays[name].astype(bool)
        return cls(
            **arrays,
            entries=np.asarray(len(split)),
            layers=np.asarray(sum(split)),
            deepest=np.asarray(max(split)),
        )
