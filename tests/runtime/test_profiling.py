"""Seconds of a step by part, from events that are written out here, and from real steps."""

from __future__ import annotations

import pytest
import torch

from planner.history.step_parts import TERMS, StepParts
from runtime.profiling.parts import OPTIMIZER_RANGE, STEP_RANGE, Event, collective_kind, step_parts
from runtime.profiling.window import STEPS, ProfileWindow, first_profiled

MS = 1_000_000


def operator(name: str, start: float, end: float, **more: object) -> Event:
    """An event between two milliseconds."""
    return Event(name, round(start * MS), round(end * MS), **more)  # type: ignore[arg-type]


def test_host_operators_count_without_those_that_they_call() -> None:
    found = step_parts(
        [
            operator(STEP_RANGE, 0, 100, is_range=True),
            operator("aten::linear", 0, 40),
            operator("aten::addmm", 5, 35),
            operator("aten::copy_", 6, 8),
            operator("aten::scaled_dot_product_attention", 40, 60),
            operator("aten::mul", 45, 50),
            operator("aten::gelu", 60, 70),
            operator(OPTIMIZER_RANGE, 80, 95, is_range=True),
            operator("aten::addcdiv_", 82, 92),
            operator("c10d::allreduce_", 93, 95),
        ]
    )
    assert found is not None
    # The products keep what they call; Python is what nothing else took, in the optimizer too.
    assert found.by_term() == pytest.approx(
        {
            "products": 0.030,
            "attention": 0.020,
            "elementwise": 0.020,
            "optimizer": 0.010,
            "host_gaps": 0.018,
            "communication": 0.002,
        }
    )
    assert found.collectives == pytest.approx({"all_reduce": 0.002})
    assert found.total == pytest.approx(0.1)


def test_a_long_wait_counts_for_the_message_that_is_under_way_and_a_short_one_for_python() -> None:
    events = [
        operator(STEP_RANGE, 0, 20, thread=1, is_range=True),
        operator("aten::mm", 0, 5, thread=1),
        operator("gloo:recv", 4, 12, thread=1, overlaps=True),
        operator("gloo:send", 0, 20, thread=1, overlaps=True),
        operator("aten::mm", 14, 17, thread=1),
        operator("aten::mm", 17.1, 20, thread=1),
        operator("gloo:all_reduce", 17, 20, thread=2),
    ]
    found = step_parts(events)
    assert found is not None
    assert found.collectives == pytest.approx({"send_receive": 0.007})
    assert found.host_gaps == pytest.approx(0.0021)


def test_kernels_of_a_device_hide_collectives_and_what_nothing_fills_is_idle() -> None:
    kernel = {"on_device": True}
    found = step_parts(
        [
            operator(STEP_RANGE, 0, 50, is_range=True),
            operator(OPTIMIZER_RANGE, 30, 40, is_range=True),
            operator("aten::_fused_adamw_", 31, 32, number=7),
            operator("nvjet_tst_128x256_64x4", 0, 10, **kernel),
            operator("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 5, 18, **kernel, thread=9),
            operator("pytorch_flash::flash_fwd_kernel", 10, 14, **kernel),
            operator("triton_poi_fused_add_0", 18, 22, **kernel),
            operator("multi_tensor_apply_kernel", 32, 36, **kernel, launched_by=7),
            operator("planner: optimizer", 30, 40, **kernel, is_range=True),
        ]
    )
    assert found is not None
    assert found.by_term() == pytest.approx(
        {
            "products": 0.010,
            "attention": 0.004,
            "elementwise": 0.004,
            "optimizer": 0.004,
            "host_gaps": 0.024,
            "communication": 0.004,
        }
    )
    assert list(found.collectives) == ["reduce_scatter"]


def test_the_mean_of_steps_and_nothing_without_any() -> None:
    steps = [operator(STEP_RANGE, start, start + 10, is_range=True) for start in (0, 100)]
    work = [operator("aten::mm", 2, 4), operator("aten::mm", 100, 108), operator("aten::mm", 50, 90)]
    found = step_parts([*work, *steps])
    assert found is not None and found.products == pytest.approx(0.005)
    assert step_parts(work) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("c10d::_allgather_base_", "all_gather"),
        ("_c10d_functional::reduce_scatter_tensor", "reduce_scatter"),
        ("ncclDevKernel_SendRecv", "send_receive"),
        ("ncclKernel_AllReduce_RING_LL_Sum", "all_reduce"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("_c10d_functional::wait_tensor", None),
        ("aten::mm", None),
        ("void at::native::reduce_kernel", None),
    ],
)
def test_collectives_are_known_by_name(name: str, kind: str | None) -> None:
    assert collective_kind(name) == kind


def test_short_runs_are_not_profiled_and_others_after_their_warm_up() -> None:
    assert first_profiled(0, 19) is None
    assert first_profiled(0, 20) == 5
    assert first_profiled(100, 119) is None
    assert first_profiled(100, 150) == 105


class Optimizer:
    """Stands for that of a trainer."""

    def step(self) -> None:
        torch.ones(1000).add_(1.0)

    squared_norm = scale = clip_values = step


def test_real_operators_are_seen_and_the_optimizer_is_left_as_it_was() -> None:
    optimizer, cpu = Optimizer(), torch.device("cpu")
    window = ProfileWindow(3, True, cpu)
    held = [number for number in range(8) if window.holds(number)]
    assert held == [3, 4] and len(held) == STEPS
    one = torch.ones(300, 300)
    for iteration in held:
        assert window.parts is None
        with window.step(iteration, optimizer):
            one = (one @ one).softmax(0)
            optimizer.step()
    assert vars(optimizer) == {}
    assert window.parts is not None
    found = window.parts.by_term()
    assert {name for name in TERMS if not found[name]} == {"attention", "communication"}


def test_a_profiler_that_fails_is_a_note_and_the_steps_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("busy")

    monkeypatch.setattr("runtime.profiling.window.profile", fails)
    window, taken = ProfileWindow(1, True, torch.device("cpu")), []
    for iteration in (1, 2):
        with window.step(iteration, Optimizer()):
            taken.append(iteration)
    assert taken == [1, 2] and window.parts is None
    assert capsys.readouterr().err == "note: no profile of this run (RuntimeError: busy)\n"


def test_other_ranks_profile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.profiling.window.profile", None)
    window = ProfileWindow(1, False, torch.device("cpu"))
    for iteration in (1, 2):
        with window.step(iteration, Optimizer()):
            pass
    assert window.parts is None


def test_scaled_parts_keep_their_proportions() -> None:
    parts = StepParts(products=3.0, host_gaps=1.0, collectives={"all_reduce": 2.0}).scaled(0.5)
    assert (parts.total, parts.products, parts.collectives) == (3.0, 1.5, {"all_reduce": 1.0})
