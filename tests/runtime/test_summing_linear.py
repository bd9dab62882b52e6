"""GEMMs that add weight gradients to sums, instead of additions by kernels of their own."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from costmodels import ModelSpec
from runtime.dryrun import compiled_layers
from runtime.dryrun.fake_gpu import fake_gpu
from runtime.dryrun.run import trace
from runtime.model.adapters import AdaptedLinear
from runtime.model.experts import Experts
from runtime.model.transformer import Transformer
from runtime.parallel import summing_linear, working_copies
from runtime.parallel.initialisation import initialise
from runtime.parallel.summing_linear import _adds_right, add_product, can_sum, sums_in_gemms
from runtime.parallel.working_copies import GradientSums, WorkingCopies, computing
from tests.support.gpu_lowering import seen_graphs
from tests.support.layouts import parse_layout
from tests.support.models import LLAMA, MODELS
from tests.support.ranks.summing import in_gemms_and_apart
from tests.support.worker_pool import WorkerPool

CPU = torch.device("cpu")


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the CPU stand for a GPU, whose GEMMs add to sums."""
    for decides in ("sums_in_gemms", "adds_in_kernel"):
        monkeypatch.setattr(working_copies, decides, lambda *_: True)


on_gpu = pytest.mark.usefixtures("as_gpu")


def gradients_of(spec: ModelSpec, text: str, stays: bool, compiled: bool) -> tuple[dict[str, Tensor], int]:
    """Gradients of the second of two steps of three microbatches, and the number of sums that GEMMs add to;
    layers run without a compiler."""
    stage = Transformer(spec, spec.vocab)
    initialise(stage, spec, 1)
    stage.place(torch.arange(spec.seq))
    copies = WorkingCopies(stage, parse_layout(text, spec), compiled)
    if stays:
        copies.stay()
    draw = torch.Generator().manual_seed(2)
    for _ in range(2):
        with computing([copies]):
            for number in range(3):
                if number == 2:
                    copies.reduce_next()
                tokens = torch.randint(spec.vocab, (2, spec.seq), generator=draw)
                stage(tokens).float().square().mean().backward()
            # Ranks have begun to sum up all layers.
            assert not copies.waiting
        found = {}
        for name, master in stage.named_parameters():
            assert master.grad is not None, name
            found[name], master.grad = master.grad, None
    return found, sum(len(sums.places) for _, sums in copies.groups)


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert bool((found[name] == values).all()), name


@on_gpu
@pytest.mark.oldest
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_separate_additions(name: str, stays: bool) -> None:
    """On a CPU each gradient is rounded to 16 bits before it is added, so that sums are bitwise equal."""
    spec = MODELS[name].model_copy(update={"mtp": None})
    found, places = gradients_of(spec, "precision=bf16", stays, compiled=True)
    expected, none = gradients_of(spec, "precision=bf16", stays, compiled=False)
    assert_equal(found, expected)
    with torch.device("meta"):
        stage = Transformer(spec, spec.vocab)
    linears = [one for block in stage.blocks for one in block.modules() if isinstance(one, nn.Linear)]
    experts = [one for block in stage.blocks for one in block.modules() if isinstance(one, Experts)]
    matrices = sum(parameter.dim() == 3 for one in experts for parameter in one.parameters())
    assert sum(map(can_sum, linears)) >= 4 * spec.layers and none == 0
    assert places == sum(map(can_sum, linears)) + matrices


@on_gpu
@pytest.mark.parametrize("text", ["precision=bf16", "precision=bf16,gbs=4"])
def test_ranks_sum_what_gemms_have_added(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of a layer are parts of the buffer that ranks reduce as soon as its last gradient is there."""
    reduced: list[Tensor] = []

    def all_reduce(x: Tensor, **_: Any) -> Any:
        reduced.append(x)
        return type("Work", (), {"wait": lambda self: x.mul_(2)})()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(working_copies, "group_of", lambda parameter: "the replicas")
    spec = MODELS["gpt2"]
    found, places = gradients_of(spec, text, stays=False, compiled=True)
    sizes = [x.numel() for x in reduced]
    expected, _ = gradients_of(spec, text, stays=False, compiled=False)
    assert places and sizes == [x.numel() for x in reduced[len(sizes) :]]
    assert_equal(found, expected)


@on_gpu
@pytest.mark.parametrize("text", ["precision=fp32", "precision=bf16,gradient_reduction=bf16"])
def test_gradients_in_the_format_of_their_sums_are_added_as_before(text: str) -> None:
    assert gradients_of(MODELS["llama"], text, stays=False, compiled=True)[1] == 0


def test_a_step_takes_no_memory_for_sums_before_its_first_backward_pass() -> None:
    copies = [nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))]
    sums = GradientSums(copies, torch.float32, None, lambda: None)
    linear = nn.Linear(4, 8)
    sums.add_in_gemm(copies[0], linear)
    assert not sums.sums
    operands = torch.ones(8, 3, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16)
    for count in (1, 2):
        torch.ops.planner.add_weight_gradient(*operands, linear.place)
        assert sums.sums[0].eq(3.0 * count).all()
    assert [number for number, _ in sums.take()] == [0] and not sums.sums


def test_a_layer_that_multiplies_by_what_it_holds_itself_gets_a_place() -> None:
    plain, shared, narrow = (nn.Linear(4, 8) for _ in range(3))
    shared.sharers, narrow.product = 2, summing_linear  # type: ignore[assignment]
    assert can_sum(plain)
    assert not any(map(can_sum, (shared, narrow, AdaptedLinear(plain, 2, 1.0))))
    plain.sharers, plain.product = 1, nn.functional.linear  # type: ignore[assignment]
    assert can_sum(plain)


class _Calls(TorchDispatchMode):
    """Operators that write to a given result, with their arguments; none of them runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, Sequence[Any], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "out" not in (kwargs or {}):
            return func(*args, **(kwargs or {}))
        self.found.append((str(func), args, kwargs))
        return kwargs["out"]


@pytest.mark.oldest
def test_a_gpus_gemm_reads_and_writes_the_sum_itself() -> None:
    """A sum that were not both input and result would be copied."""
    with fake_gpu(), torch._subclasses.FakeTensorMode():
        total = torch.empty(48, 32, device="cuda")
        sizes = (48, 64), (64, 32)
        operands = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        for holds in (False, True):
            with _Calls() as calls:
                add_product(total, holds, operands[0], operands[1])
            [(name, (before, left, right, dtype), named)] = calls.found
            assert name == "aten.addmm.dtype_out" and dtype == torch.float32
            assert before is named["out"] is total and left is operands[0]
            assert right is operands[1] and named.get("beta", 1) == int(holds)


@pytest.mark.oldest
@pytest.mark.slow
def test_compiled_layers_on_a_gpu_add_in_their_gemms() -> None:
    """The backward graph makes no gradient of a weight, and no addition follows it."""
    spec = MODELS["llama"].model_copy(update={"layers": 3})
    graphs: list[Counter[str]] = []
    dims: set[int] = set()
    memory_function, add = compiled_layers.memory_function, GradientSums._add

    def see(graph: fx.GraphModule, tracker: Any) -> Any:
        graphs.append(Counter(compiled_layers.name_of(node) for node in graph.graph.nodes))
        return memory_function(graph, tracker)

    def adding(sums: GradientSums, gradients: Iterable[tuple[int, Tensor]]) -> None:
        known = list(gradients)
        if sums.places:
            dims.update(gradient.dim() for _, gradient in known)
        add(sums, known)

    with seen_graphs(see), patch.object(GradientSums, "_add", adding):
        traced = trace(spec, parse_layout("mbs=1,gbs=4,precision=bf16", spec), compiled=True)
    backward = [graph for graph in graphs if graph[compiled_layers.ADDED]]
    # Seven matrices, with a product for the input and one for the sum each.
    assert [(graph[compiled_layers.ADDED], graph["aten::mm"]) for graph in backward] == [(7, 7)]
    # Norms of layers alone.
    assert dims == {1}
    assert traced.peak.allocated["gradients"] >= 4 * spec.parameters


@pytest.mark.oldest
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_dry_runs_hold_sums_of_layers_that_are_not_compiled() -> None:
    """Attention that offloads runs uncompiled, and its weights have sums and moments like all others."""
    spec = LLAMA
    layout = parse_layout("mbs=1,gbs=4,precision=bf16,offload_activations=true", spec)
    held = trace(spec, layout, compiled=True).peak.allocated
    assert held["gradients"] >= 4 * spec.parameters
    # The masters in fp32 are parameters.
    assert held["optimizer"] >= 8 * spec.parameters


@pytest.fixture
def tried() -> Iterator[Any]:
    """The function that tries a device out, which forgets what it has found."""
    sums_in_gemms.cache_clear()
    yield sums_in_gemms
    sums_in_gemms.cache_clear()


def test_a_device_that_adds_right_is_used(
    tried: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU stands for a GPU."""
    assert _adds_right(CPU, torch.bfloat16) and _adds_right(CPU, torch.float16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    right = partial(_adds_right, CPU)
    monkeypatch.setattr(summing_linear, "_adds_right", lambda _, dtype: right(dtype))
    assert tried(torch.device("cuda"), torch.bfloat16) and capsys.readouterr().err == ""


@pytest.mark.oldest
def test_a_cpu_adds_apart(tried: Any) -> None:
    """An operation for each weight would only take time of the host, which small models wait for."""
    assert not tried(CPU, torch.bfloat16)
    assert gradients_of(LLAMA, "precision=bf16", stays=False, compiled=True)[1] == 0


def _raising(*_: Any) -> None:
    raise RuntimeError("no such kernel\nand where it was")


def _without_earlier_ones(sum_NK: Tensor, holds: bool, left_NT: Tensor, right_TK: Tensor) -> None:
    sum_NK.copy_(left_NT @ right_TK)


def _with_what_was_there(sum_NK: Tensor, holds: bool, left_NT: Tensor, right_TK: Tensor) -> None:
    sum_NK.add_(left_NT @ right_TK)


@pytest.mark.parametrize(
    ("adds", "why"),
    [
        (_raising, "no such kernel"),
        (_without_earlier_ones, "other values"),
        (_with_what_was_there, "other values"),
    ],
)
def test_a_device_that_cannot_add_so_adds_by_kernels_of_its_own(
    adds: Any, why: str, tried: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device is tried once, and one line says why; the CPU stands for a GPU."""
    right, gpu = _adds_right, torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(summing_linear, "add_product", adds)
    monkeypatch.setattr(summing_linear, "_adds_right", lambda _, dtype: right(CPU, dtype))
    for _ in range(2):
        assert not tried(gpu, torch.bfloat16)
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line and "where" not in line
    monkeypatch.setattr(working_copies, "sums_in_gemms", lambda *_: tried(gpu, torch.bfloat16))
    found, places = gradients_of(MODELS["llama"], "precision=bf16", stays=False, compiled=True)
    assert places == 0
    monkeypatch.undo()
    assert_equal(found, gradients_of(MODELS["llama"], "precision=bf16", stays=False, compiled=False)[0])


CASES = [
    (LLAMA, "precision=bf16"),
    (LLAMA, "dp=2,precision=bf16"),
    pytest.param(MODELS["gpt2"], "precision=fp16", marks=pytest.mark.slow),
    pytest.param(MODELS["qwen"], "dp=2,precision=bf16", marks=pytest.mark.slow),
    pytest.param(LLAMA, "tp=2,sp=1,recompute=full,precision=bf16", marks=pytest.mark.slow),
    pytest.param(LLAMA, "pp=2,recompute=selective,precision=bf16", marks=pytest.mark.slow),
    pytest.param(MODELS["deepseek"], "cp=2,precision=bf16", marks=pytest.mark.slow),
    pytest.param(LLAMA, "offload_activations=true,precision=bf16", marks=pytest.mark.slow),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(("spec", "text"), CASES)
def test_compiled_layers_train_as_with_separate_additions(
    pool: WorkerPool, spec: ModelSpec, text: str
) -> None:
    """Losses, norms of gradients and weights of two steps of four microbatches, on all ranks."""
    layout = parse_layout(f"mbs=1,{text}", spec)
    layout = layout.model_copy(update={"global_batch_size": 4 * layout.data_parallel})
    for found, expected, received in pool.run(in_gemms_and_apart, layout.world_size, spec, layout):
        assert found.losses == expected.losses and found.norms == expected.norms
        assert_equal(found.weights, expected.weights)
        assert received > 0
