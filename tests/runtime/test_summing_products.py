"""Kernels that add weight gradients of experts, and of GEMMs in 8 bits, to sums; their trials on a device."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from costmodels import ModelSpec
from runtime.dryrun.run import trace
from runtime.dryrun.tracker import Tracker
from runtime.model.experts import Experts
from runtime.model.transformer import Transformer
from runtime.parallel import summing_trial, working_copies
from runtime.parallel.summing_experts import sum_experts
from runtime.parallel.summing_layers import sizes_of
from runtime.parallel.summing_linear import Place
from runtime.parallel.summing_products import GROUPED, SCALED, add_grouped_product, chosen
from runtime.parallel.summing_trial import Contest, Sizes, adds_in_kernel, is_right
from runtime.parallel.working_copies import GradientSums
from tests.support import ROOT
from tests.support.gpu_lowering import lowered_products
from tests.support.layouts import parse_layout
from tests.support.models import LLAMA, MODELS
from tests.support.ranks.summing import in_gemms_and_apart
from tests.support.triton_builds import SHARED_KIB, build
from tests.support.worker_pool import WorkerPool

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with PyTorch for CUDA")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")

CPU, GPU = torch.device("cpu"), torch.device("cuda")

KINDS = (GROUPED, SCALED)

MIXTRAL = MODELS["mixtral"].model_copy(update={"layers": 2})

SIZES = Sizes(8, 32, 48, 64)

BLOCK = 512
"""Bytes of the smallest block of PyTorch's allocator."""


@pytest.mark.oldest
@pytest.mark.slow
@needs_triton
def test_kernels_add_what_they_should_in_tritons_interpreter() -> None:
    """Empty and tiny groups, sides that are no multiples of a tile, any strides and offsets, in fp64."""
    command = [sys.executable, "-m", "tests.support.summing_numbers"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    errors = json.loads(done.stdout or done.stderr)
    # Of the magnitudes that are added up. The interpreter rounds the smallest numbers in 8 bits.
    limits = {name: 1e-5 if name.startswith("scaled") else 2e-6 for name in errors}
    assert len(errors) == 31
    assert {name: error for name, error in errors.items() if not error <= limits[name]} == {}


GROUPED_TYPES = {"left": "*bf16", "right": "*bf16", "ends": "*i32", "sums": "*fp32"} | dict.fromkeys(
    ("left_n", "right_k", "sum_k"), "1"
)

SCALED_TYPES = {
    "left": "*fp8e5",
    "right": "*fp8e4nv",
    "left_scale": "*fp32",
    "right_scale": "*fp32",
    "sums": "*fp32",
} | dict.fromkeys(("left_m", "right_m", "sum_k"), "1")

ALIGNED = {
    GROUPED: {"left", "right", "ends", "sums", "N", "K", "left_r", "right_r", "sum_e", "sum_n"},
    SCALED: {"left", "right", "left_scale", "right_scale", "sums", "N", "K", "M", "left_n", "right_k"}
    | {"sum_n"},
}

PRODUCTS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""Instructions of tensor cores by compute capability."""


@pytest.mark.oldest
@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("kind", "capability"),
    [(GROUPED, 80), (GROUPED, 90), (GROUPED, 100), (SCALED, 89), (SCALED, 90), (SCALED, 100)],
)
def test_kernels_fit_their_devices(kind: str, capability: int) -> None:
    """Each of the tiles that are tried on a device, as compiled for aligned operands with dense rows."""
    from runtime.parallel import summing_kernels as kernels

    kernel, every, types = (
        (kernels.grouped_kernel, kernels.GROUPED_TILES, GROUPED_TYPES)
        if kind == GROUPED
        else (kernels.scaled_kernel, kernels.SCALED_TILES, SCALED_TYPES)
    )
    for tiles in kernels.tiles_for(every, capability // 10):
        made = build(kernel, types, ALIGNED[kind], tiles.options, capability)
        assert made.shared <= SHARED_KIB[capability] * 1024
        assert made.spilled == 0 and made.registers * 32 * tiles.warps <= 65536
        assert PRODUCTS[capability] in made.ptx
        # Operands are copied 16 bytes at a time, and sums are read and written so.
        copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", made.ptx)
        assert copies and {int(size, 0) for size in copies} == {16}
        assert "st.global.v4" in made.ptx and "ld.global.v4" in made.ptx


def test_tiles_for_each_generation() -> None:
    pytest.importorskip("triton")
    from runtime.parallel import summing_kernels as kernels

    for every in (kernels.GROUPED_TILES, kernels.SCALED_TILES):
        assert [len(kernels.tiles_for(every, major)) for major in (8, 9, 10)] == [1, 2, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_adds_right_in_tests_and_apart_otherwise(kind: str) -> None:
    if kind == SCALED:
        pytest.importorskip("torchao")
    assert is_right(kind, CPU, torch.bfloat16) and not adds_in_kernel(kind, CPU, torch.bfloat16, SIZES)


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_of_a_contest_add_the_same(kind: str) -> None:
    """A trial adds up what a job would: the same product, by either way."""
    if kind == SCALED:
        pytest.importorskip("torchao")
    found: list[Tensor] = []

    def keep(total: Tensor, *_: Any) -> None:
        found.append(total.clone())

    contest = summing_trial.contest_of(
        kind, CPU, torch.bfloat16, Sizes(2 * (kind == GROUPED) or 1, 32, 48, 64)
    )
    totals = [cell.cell_contents for cell in contest.apart.__closure__ or ()]
    [total] = [
        one for one in totals if isinstance(one, Tensor) and one.dtype == torch.float32 and one.dim() > 1
    ]
    contest.summing(None)
    keep(total)
    contest.apart()
    assert found[0].any() and torch.equal(total, 2 * found[0])


class Gpu:
    """A GPU of major compute capability 9 whose kernels run on the CPU, in given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, summing: float, apart: float) -> None:
        self.tried: list[Any] = []
        contest = Contest(self.tried.append, lambda: None)
        self.times = {"summing": summing, "apart": apart}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(summing_trial, "contest_of", lambda *_: contest)
        monkeypatch.setattr(summing_trial, "is_right", lambda *_: True)
        monkeypatch.setattr(summing_trial, "seconds", self.seconds)

    def seconds(self, run: Any, device: Any) -> float:
        before = len(self.tried)
        run()
        if len(self.tried) == before:
            return self.times["apart"]
        # Each tile is faster than the one before.
        return self.times["summing"] / len(self.tried)


@pytest.fixture
def untried() -> Iterator[None]:
    adds_in_kernel.cache_clear()
    yield
    adds_in_kernel.cache_clear()
    chosen.clear()


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_the_fastest_tiles_are_used_if_they_are_no_slower(
    kind: str, untried: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.parallel import summing_kernels as kernels

    gpu = Gpu(monkeypatch, summing=2e-3, apart=1e-3)
    assert adds_in_kernel(kind, GPU, torch.bfloat16, SIZES)
    every = kernels.GROUPED_TILES if kind == GROUPED else kernels.SCALED_TILES
    assert tuple(gpu.tried) == every and chosen[kind] == every[-1] and not lines_of(capsys)


@needs_triton
def test_a_slower_kernel_is_not_used_and_one_line_says_why(
    untried: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Gpu(monkeypatch, summing=2.2e-3, apart=1e-3)
    assert not any(adds_in_kernel(GROUPED, GPU, torch.bfloat16, SIZES) for _ in range(2))
    (line,) = lines_of(capsys)
    assert "GEMMs of experts" in line and "1.10 ms" in line and "1.00 ms" in line


@needs_triton
def test_tiles_that_are_wrong_or_do_not_fit_are_passed_over(
    untried: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.parallel import summing_kernels as kernels

    Gpu(monkeypatch, summing=1e-3, apart=1e-3)
    first, second = kernels.GROUPED_TILES
    monkeypatch.setattr(summing_trial, "is_right", lambda *given: given[-1] is second)
    assert adds_in_kernel(GROUPED, GPU, torch.bfloat16, SIZES) and chosen[GROUPED] is second

    def raising(*given: Any) -> bool:
        if given[-1] is second:
            raise MemoryError("out of resources\nwhere it was")
        return True

    monkeypatch.setattr(summing_trial, "is_right", raising)
    assert adds_in_kernel(GROUPED, GPU, torch.float16, SIZES) and chosen[GROUPED] is first
    assert not lines_of(capsys)
    monkeypatch.setattr(summing_trial, "is_right", lambda *given: given[-1] is second and raising(*given))
    assert not adds_in_kernel(SCALED, GPU, torch.bfloat16, SIZES)
    monkeypatch.setattr(summing_trial, "is_right", lambda *_: 1 / 0)
    assert not adds_in_kernel(SCALED, GPU, torch.float16, SIZES)
    wrong, failed = lines_of(capsys)
    assert "GEMMs in 8 bits" in wrong and "(other values)" in wrong and "division by zero" in failed


@pytest.mark.parametrize("missing", ["triton", "hip"])
def test_devices_without_the_kernels_add_apart(
    missing: str, untried: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Gpu(monkeypatch, summing=1e-3, apart=2e-3)
    if missing == "hip":
        monkeypatch.setattr(torch.version, "hip", "7.0")
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "runtime.parallel.summing_kernels", raising=False)
        monkeypatch.delattr("runtime.parallel.summing_kernels", raising=False)
    assert not adds_in_kernel(GROUPED, GPU, torch.bfloat16, SIZES)
    (line,) = lines_of(capsys)
    assert ("NVIDIA" if missing == "hip" else "triton") in line


def test_sizes_of_a_trial_are_those_of_the_job() -> None:
    layout = parse_layout("mbs=2,tp=2,ep=2,precision=bf16", MIXTRAL)
    with torch.device("meta"):
        stage = Transformer(MIXTRAL, MIXTRAL.vocab)
    linear, experts = torch.empty(48, 32), torch.empty(4, 96, 64)
    assert sizes_of(linear, stage, layout, 100) == (1, 48, 32, 100)
    # Each of two ranks routes a half of the tokens, to two experts each.
    assert sizes_of(experts, stage, layout, 100) == (4, 96, 64, 100)
    shared = layout.model_copy(update={"expert_tensor_parallel": 2, "expert_parallel": 1})
    assert sizes_of(experts, stage, shared, 100).rows == 200


def test_experts_without_rows_have_zero_gradients() -> None:
    """On a rank whose experts no token was sent to; ranks reduce gradients together."""
    experts = Experts(MIXTRAL).bfloat16()
    weight = experts.get_parameter("up")
    nn.init.ones_(weight)
    total = torch.full(weight.shape, torch.nan)
    holds = False

    def receive() -> tuple[Tensor, bool]:
        return total, holds

    place = Place(experts, CPU, receive, "up_place")
    sum_experts(experts)
    counts = torch.zeros(MIXTRAL.experts, dtype=torch.int64)
    x = torch.ones(0, MIXTRAL.hidden, dtype=torch.bfloat16, requires_grad=True)
    result = experts.product("up", x, counts, None)
    assert result.shape == (0, weight.shape[1])
    result.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert place.tensor.grad is not None and not total.any()


@pytest.mark.oldest
def test_a_gpus_kernels_get_operands_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the device: ends of groups stay there."""
    pytest.importorskip("triton")
    from runtime.dryrun.fake_gpu import fake_gpu
    from runtime.parallel import summing_kernels as kernels

    calls: list[Any] = []
    monkeypatch.setattr(kernels, "add_grouped", lambda *given: calls.append(given))
    with fake_gpu(), torch._subclasses.FakeTensorMode():
        total, left, right = (torch.empty(size, device="cuda") for size in ((4, 48, 32), (64, 48), (64, 32)))
        ends = torch.empty(4, dtype=torch.int32, device="cuda")
        add_grouped_product(total, True, left, right, ends)
        chosen[GROUPED] = kernels.GROUPED_TILES[1]
        add_grouped_product(total, False, left, right, ends)
        chosen.clear()
    tiles = kernels.GROUPED_TILES
    assert calls == [
        (total, True, left, right, ends, tiles[0]),
        (total, False, left, right, ends, tiles[1]),
    ]


@pytest.mark.oldest
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "text", "kind", "products"),
    [(MIXTRAL, "precision=bf16", GROUPED, 3), (LLAMA, "precision=fp8", SCALED, 7)],
)
def test_compiled_layers_on_a_gpu_add_in_kernels(
    spec: ModelSpec, text: str, kind: str, products: int
) -> None:
    """Kernels get operands that they read fast, and PyTorch's make no gradient of a weight.

    Dry runs count a gradient in 16 bits beside the sum: they hold for devices that add apart.
    """
    if kind == SCALED:
        pytest.importorskip("torchao")
    layout = parse_layout(f"mbs=1,gbs=1,{text}", spec)
    trackers: list[Tracker] = []
    beside: set[int] = set()
    add = Tracker.add_to_sum

    def adding(tracker: Tracker, place: Place, name: str) -> None:
        add(tracker, place, name)
        trackers.append(tracker)
        if name.endswith(kind):
            beside.add(tracker.blocks[-1].size)

    with lowered_products() as found, patch.object(Tracker, "add_to_sum", adding):
        in_kernels = trace(spec, layout, compiled=True).peak.allocated
    with torch.device("meta"):
        layer = Transformer(spec, spec.vocab).blocks[0]
    matrices = [one.numel() for one in layer.parameters() if one.dim() == 2 + (kind == GROUPED)]
    assert beside == {2 * elements for elements in matrices}
    assert not any(tracker.beside for tracker in trackers)
    assert [one.fault for one in found if one.fault] == []
    names = [one.kernel for one in found]
    graphs = names.count(kind) // products
    assert graphs and names.count(kind) == graphs * products and len(names) == 3 * products * graphs
    with patch.object(working_copies, "adds_in_kernel", lambda *_: False), lowered_products() as apart:
        separate = trace(spec, layout, compiled=True).peak.allocated
    assert len(apart) == len(found) and kind not in {one.kernel for one in apart}
    # A step that adds apart keeps reciprocals of scales, which take a block of memory each.
    assert sum(in_kernels.values()) + 3 * BLOCK * spec.layers >= sum(separate.values())


@pytest.mark.oldest
@pytest.mark.slow
def test_layers_whose_experts_have_places_run_as_a_chain() -> None:
    """The places of the first layer stand for those of the others."""
    given: list[int] = []
    give = GradientSums.give

    def giving(sums: GradientSums, gradients: Any) -> None:
        given.append(len(sums.places))
        give(sums, gradients)

    with patch.object(GradientSums, "give", giving):
        trace(MIXTRAL, parse_layout("mbs=1,gbs=4,precision=bf16", MIXTRAL), compiled=True)
    # The linear layers of attention, and the matrices of the experts, of the last layer.
    assert set(given) == {4, 3}


@needs_compiler
@pytest.mark.slow
def test_dry_runs_hold_gradients_beside_sums_of_experts_that_are_not_compiled() -> None:
    spec = MIXTRAL
    layout = parse_layout("mbs=1,gbs=2,precision=bf16,ep=2,dp=2", spec)
    in_kernels = trace(spec, layout, compiled=True).peak.allocated
    with patch.object(working_copies, "adds_in_kernel", lambda *_: False):
        separate = trace(spec, layout, compiled=True).peak.allocated
    assert sum(in_kernels.values()) >= sum(separate.values())


CASES = [
    (MIXTRAL, "precision=bf16"),
    pytest.param(MIXTRAL, "dp=2,ep=2,precision=bf16", marks=pytest.mark.slow),
    pytest.param(MIXTRAL, "tp=2,sp=1,recompute=full,precision=bf16", marks=pytest.mark.slow),
    pytest.param(
        MIXTRAL, "pp=2,recompute=selective,recompute_modules=mlp,precision=bf16", marks=pytest.mark.slow
    ),
    pytest.param(MODELS["deepseek"], "dp=2,ep=2,etp=1,precision=bf16", marks=pytest.mark.slow),
    pytest.param(MIXTRAL, "dp=2,precision=fp8", marks=pytest.mark.slow),
    pytest.param(MIXTRAL, "dp=2,ep=2,precision=fp8", marks=pytest.mark.slow),
    pytest.param(MIXTRAL, "ep=1,etp=2,tp=2,sp=1,precision=bf16", marks=pytest.mark.slow),
    pytest.param(LLAMA, "tp=2,sp=1,precision=fp8", marks=pytest.mark.slow),
    pytest.param(MODELS["gpt2"], "tp=2,dp=2,precision=fp8", marks=pytest.mark.slow),
    pytest.param(LLAMA, "precision=fp8", marks=pytest.mark.slow),
    pytest.param(MODELS["gpt2"], "precision=fp8", marks=pytest.mark.slow),
    pytest.param(LLAMA, "dp=2,recompute=full,precision=fp8", marks=pytest.mark.slow),
]


@needs_compiler
@pytest.mark.parametrize(("spec", "text"), CASES)
def test_compiled_layers_train_as_with_separate_additions(
    pool: WorkerPool, spec: ModelSpec, text: str
) -> None:
    """Losses, norms of gradients and weights of two steps of four microbatches, on all ranks."""
    if "fp8" in text:
        pytest.importorskip("torchao")
    layout = parse_layout(f"mbs=1,{text}", spec)
    layout = layout.model_copy(update={"global_batch_size": 4 * layout.data_parallel})
    for found, expected, received in pool.run(in_gemms_and_apart, layout.world_size, spec, layout):
        assert found.losses == expected.losses and found.norms == expected.norms
        assert found.weights.keys() == expected.weights.keys()
        for name, values in expected.weights.items():
            assert bool((found.weights[name] == values).all()), name
        assert received > 0
