"""`LayoutTable`: many layouts as a structure of arrays, one row for each layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from costmodels.dataclass import dataclass
from costmodels.spec.hardware import Precision
from costmodels.spec.layout import (
    ContextParallelForm,
    Fp8Recipe,
    GradientReduction,
    Layout,
    MuonMode,
    Optimizer,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    Schedule,
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

RECOMPUTE_KINDS: tuple[Recompute, ...] = get_args(Recompute)
"""Recompute kinds in the order of their codes: 0 none, 1 selective, 2 full."""

RECOMPUTE_METHODS: tuple[RecomputeMethod, ...] = get_args(RecomputeMethod)

RECOMPUTE_MODULES: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
"""Modules in the order of their bits: core attention is 1, the next one 2, and so on."""

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

CONTEXT_FORMS: tuple[ContextParallelForm, ...] = get_args(ContextParallelForm)

OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)

CODES: dict[str, tuple[str, ...]] = {
    "context_parallel_form": CONTEXT_FORMS,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE_KINDS,
    "recompute_method": RECOMPUTE_METHODS,
    "optimizer": OPTIMIZERS,
}
"""Values of fields of words; their columns hold indices into these tuples."""

NONE, SELECTIVE, FULL = (RECOMPUTE_KINDS.index(kind) for kind in ("none", "selective", "full"))
UNIFORM, BLOCK = (RECOMPUTE_METHODS.index(method) for method in ("uniform", "block"))
ALL_GATHER, ALL_TO_ALL, RING = (CONTEXT_FORMS.index(form) for form in ("all_gather", "all_to_all", "ring"))

BOOLEANS = ("sequence_parallel", "offload_activations", "offload_optimizer", "expert_halves", "cuda_graphs")


def code_of(field: str, value: Any) -> int:
    """The number for a value of a field of `Layout`: a code, a bit mask, or the value itself."""
    if field == "recompute_modules":
        return sum(1 << RECOMPUTE_MODULES.index(module) for module in value)
    return CODES[field].index(value) if field in CODES else int(value)


def value_of(field: str, code: Any) -> Any:
    """The value of a field of `Layout` from its number."""
    if field == "recompute_modules":
        return tuple(module for bit, module in enumerate(RECOMPUTE_MODULES) if code >> bit & 1)
    if field in BOOLEANS:
        return bool(code)
    return CODES[field][code] if field in CODES else code


@dataclass(frozen=True)
class LayoutTable:
    """Layouts that share the fields of `FORMATS`. All arrays have shape [n].

    Arrays of one layout (`LayoutTable.one`) are 0-d, and arrays of a grid of layouts broadcast against each
    other: each formula on degrees is written once for all three. `split` points into `splits`, the distinct
    `layers_per_stage` of the rows: thousands of layouts share a few of them.
    """

    tensor_parallel: Ints
    sequence_parallel: Bools
    pipeline_parallel: Ints
    virtual_pipeline_parallel: Ints
    context_parallel: Ints
    context_parallel_form: Ints
    """Codes: indices of `CONTEXT_FORMS`."""
    expert_parallel: Ints
    expert_tensor_parallel: Ints
    data_parallel: Ints
    zero_stage: Ints
    zero_replicas: Ints
    schedule: Ints
    """Codes: indices of `SCHEDULES`."""
    micro_batch_size: Ints
    global_batch_size: Ints
    recompute: Ints
    """Codes: indices of `RECOMPUTE_KINDS`."""
    recompute_modules: Ints
    """Sums of the bits of `RECOMPUTE_MODULES`."""
    recompute_method: Ints
    """Codes: indices of `RECOMPUTE_METHODS`."""
    recompute_num_layers: Ints
    offload_activations: Bools
    offload_optimizer: Bools
    optimizer: Ints
    """Codes: indices of `OPTIMIZERS`."""
    expert_halves: Bools
    cuda_graphs: Bools
    split: Ints
    splits: tuple[tuple[int, ...], ...]
    precision: Precision
    gradient_reduction: GradientReduction = "fp32"
    fp8_recipe: Fp8Recipe = "default"
    fp8_param_gather: bool = False
    muon_mode: MuonMode = "default"

    def __len__(self) -> int:
        return len(self.tensor_parallel)

    def _of_split(self, number: Callable[[tuple[int, ...]], int]) -> Ints:
        """Values computed once for each split, for all rows."""
        return np.array([number(split) for split in self.splits], dtype=np.int64)[self.split]

    @property
    def stages(self) -> Ints:
        """Pipeline stages: ranks times chunks."""
        return self.pipeline_parallel * self.virtual_pipeline_parallel

    @cached_property
    def entries(self) -> Ints:
        """Number of entries of `layers_per_stage`."""
        return self._of_split(len)

    @cached_property
    def layers(self) -> Ints:
        """Total number of layers of all stages."""
        return self._of_split(sum)

    @cached_property
    def deepest(self) -> Ints:
        """Number of layers of the largest stage; 0 where stages have no layers yet."""
        return self._of_split(lambda split: max(split, default=0))

    @cached_property
    def micro_batches(self) -> Ints:
        """Microbatches of each data-parallel rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    @cached_property
    def replicas(self) -> Ints:
        """Ranks that hold the same share of the model: data- and context-parallel ones."""
        return self.data_parallel * self.context_parallel

    @cached_property
    def zero_shards(self) -> Ints:
        """Ranks over which ZeRO splits; 1 without ZeRO."""
        return np.where(self.zero_stage > 0, self.replicas // self.zero_replicas, 1)

    @property
    def keeps_whole(self) -> Bools:
        """Rows whose ranks hold and update all of their parameters on the device."""
        result: Bools = (self.zero_stage == 0) & ~self.offload_optimizer
        return result

    @cached_property
    def expert_replicas(self) -> Ints:
        """Ranks that hold the same share of the same experts (Megatron-LM's expert data parallelism)."""
        devices = self.tensor_parallel * self.replicas
        return np.maximum(devices // (self.expert_parallel * self.expert_tensor_parallel), 1)

    @cached_property
    def expert_shards(self) -> Ints:
        """Ranks over which ZeRO splits the experts of one device; the same ranks as for a copy of the other
        parameters."""
        shards = np.maximum(self.expert_replicas // self.zero_replicas, 1)
        return np.where(self.zero_stage > 0, shards, 1)

    @property
    def gathers_fp8(self) -> Bools:
        """Rows that gather weights in fp8 (`Layout.gathers_fp8`)."""
        result: Bools = self.fp8_param_gather & (self.zero_stage > 0) & ~self.offload_optimizer
        return result

    def recomputes(self, module: RecomputeModule) -> Bools:
        """Rows that recompute `module` in selective recomputation."""
        return self.recompute_modules & code_of("recompute_modules", (module,)) > 0

    def runs(self, *schedules: Schedule) -> Bools:
        """Rows whose schedule is one of `schedules`."""
        masks = [self.schedule == SCHEDULES.index(schedule) for schedule in schedules]
        result: Bools = np.logical_or.reduce(masks) if len(masks) > 1 else masks[0]
        return result

    def take(self, rows: Ints | Bools | slice) -> LayoutTable:
        """The rows that an index or mask array selects, or those of a slice without copying."""
        return replace(self, **{name: getattr(self, name)[rows] for name in ARRAY_FIELDS})

    def ends(self, name: str) -> tuple[Any, Any]:
        """The least and the largest value of one column; values that no row has may lie beyond the rows'."""
        column = getattr(self, name)
        return column.min(), column.max()

    def column(self, name: str, rows: Ints) -> Any:
        """One column of the rows that an index selects."""
        return getattr(self, name)[rows]

    def layout(self, row: int) -> Layout:
        """One row as a `Layout`."""
        codes = {name: getattr(self, name)[row].item() for name in ARRAY_FIELDS}
        split = self.splits[codes.pop("split")]
        values = {name: value_of(name, code) for name, code in codes.items()}
        return Layout(
            **values,
            layers_per_stage=split,
            **self.formats,
        )

    @property
    def formats(self) -> dict[str, Any]:
        """Fields of `Layout` that all rows share, besides their splits."""
        return {name: getattr(self, name) for name in FORMATS}

    def with_batch(self, size: int) -> LayoutTable:
        """This table with steps of `size` sequences."""
        other = copy(self)
        vars(other).pop("micro_batches", None)
        vars(other)["global_batch_size"] = np.asarray(size)
        return other

    @classmethod
    def one(cls, layout: Layout) -> LayoutTable:
        """One layout, whose arrays are 0-d."""
        table = cls.of([layout])
        arrays: dict[str, Any] = {name: np.asarray(getattr(table, name)[0]) for name in ARRAY_FIELDS}
        return replace(table, **arrays)

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> LayoutTable:
        """A table of given layouts, which must share their number formats."""
        kinds = {shared_fields(layout) for layout in layouts}
        if len(kinds) != 1:
            raise ValueError(
                "a table holds one precision and one gradient reduction, fp8 of one kind (fp8_recipe, "
                f"fp8_param_gather) and one muon_mode, not {sorted(kinds)}"
            )
        formats: dict[str, Any] = dict(zip(FORMATS, kinds.pop(), strict=True))
        splits, places = numbered_splits(layout.layers_per_stage for layout in layouts)
        columns: dict[str, Any] = {
            name: np.asarray([code_of(name, getattr(layout, name)) for layout in layouts], dtype=np.int64)
            for name in ARRAY_FIELDS
            if name != "split"
        }
        columns |= {name: columns[name].astype(bool) for name in BOOLEANS}
        columns["split"] = places
        return cls(**columns, splits=splits, **formats)


FORMATS = ("precision", "gradient_reduction", "fp8_recipe", "fp8_param_gather", "muon_mode")
"""Fields of `Layout` that all rows of a table share: number formats, and the division of Muon's work."""


def shared_fields(layout: Layout) -> tuple[Any, ...]:
    """Values that all layouts of one table must share, in the order of `FORMATS`."""
    return tuple(getattr(layout, name) for name in FORMATS)


SHARED_FIELDS = ("splits", *FORMATS)

ARRAY_FIELDS = tuple(name for name in LayoutTable.__dataclass_fields__ if name not in SHARED_FIELDS)
"""Names of the per-row arrays."""


def by_context_form(table: LayoutTable, gathered: Floats, exchanged: Floats, ring: Floats | float) -> Floats:
    """One of three values by each row's form of context parallelism; five times as fast as `np.choose`."""
    form = table.context_parallel_form
    return np.where(form == ALL_GATHER, gathered, np.where(form == ALL_TO_ALL, exchanged, ring))


def numbered_splits(splits: Iterable[tuple[int, ...]]) -> tuple[tuple[tuple[int, ...], ...], Ints]:
    """The distinct layers of stages, in order of occurrence, and the index of each row's, [n]."""
    every = list(splits)
    places = {split: place for place, split in enumerate(dict.fromkeys(every))}
    return tuple(places), np.array([places[split] for split in every], dtype=np.int64)


def distinct_numbers(column: Ints) -> list[int]:
    """The different numbers of a column, ascending."""
    # Without an index, NumPy first imports numpy.ma (some 30 ms) to see whether the array is masked.
    found: list[int] = np.unique(column, return_index=True)[0].tolist()
    return found


def combined_key(columns: Sequence[Ints | Bools]) -> Ints:
    """One number for each row that orders rows by their columns of small numbers, the first column first."""
    key = columns[0].astype(np.int64)
    for column in columns[1:]:
        base = int(column.max(initial=0)) + 1
        if int(key.max(initial=0)) > np.iinfo(np.int64).max // base - base:
            key = np.unique(key, return_inverse=True)[1]
        key = key * base + column
    return key


def distinct_rows(columns: Sequence[Ints | Bools]) -> tuple[Ints, Ints]:
    """First row of each distinct combination of columns of small numbers, and the index of each row's
    combination."""
    _, first, code = np.unique(combined_key(columns), return_index=True, return_inverse=True)
    return first, code
