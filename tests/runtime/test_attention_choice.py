"""The choice among kernels of attention, with trials that stand in for those of a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.codecache import FxGraphHashDetails
from torch.nn.attention import _registry

from costmodels import ModelSpec
from costmodels.errors import InputError
from runtime.job.attention_choice import Calls, attention_calls, choose, fastest, tried, use_attention
from runtime.model import attention_switches
from runtime.model.attention_switches import PREFERENCE, offered_kernels, only
from runtime.parallel.attention_trial import AttentionCall, Trial, WrongResult, check, operands, trial
from runtime.settings.training_options import ATTENTION_KERNELS, TrainingOptions
from tests.support.layouts import parse_layout
from tests.support.models import LLAMA, MODELS
from tests.support.ranks import attention as work
from tests.support.worker_pool import WorkerPool

CPU = torch.device("cpu")

CALL = AttentionCall(batch=2, heads=4, kv_heads=2, seq=150, head=32, value=32, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def own_order() -> Iterator[None]:
    """PyTorch's order of kernels, before and after."""
    yield
    PREFERENCE.use(None)


def took(seconds: float, held: int = 100, peak: int = 200) -> Trial:
    return Trial(seconds, held, peak)


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ({"flash": took(2.0), "cudnn": took(1.0), "efficient": took(3.0)}, "cudnn"),
        ({"flash": took(1.0), "cudnn": took(0.98)}, "flash"),
        ({"flash": took(1.0), "cudnn": took(1.0)}, "flash"),
        ({"flash": took(1.0), "cudnn": took(0.5, held=102)}, "flash"),
        ({"flash": took(1.0), "cudnn": took(0.5, peak=230), "fa3": took(0.9, peak=210)}, "fa3"),
        ({"cudnn": took(1.0), "efficient": took(2.0, held=1)}, "cudnn"),
        ({}, "flash"),
    ],
)
def test_the_fastest_kernel_wins_that_holds_no_more_and_a_tie_keeps_pytorchs(
    trials: dict[str, Trial], chosen: str
) -> None:
    assert fastest("flash", trials) == chosen


def test_a_kernel_that_raises_or_is_wrong_is_not_chosen() -> None:
    errors: dict[str, Exception] = {
        "cudnn": torch.OutOfMemoryError("out of memory\nand more"),
        "efficient": WrongResult("results with a relative error of 1"),
        "fa3": ImportError(),
    }

    def measure(name: str) -> Trial:
        if name in errors:
            raise errors[name]
        return took(1.0)

    trials, failures = tried(["cudnn", "efficient", "fa3", "flash"], measure)
    assert list(trials) == ["flash"]
    assert failures == {
        "cudnn": "out of memory",
        "efficient": "results with a relative error of 1",
        "fa3": "ImportError",
    }


@pytest.mark.oldest
@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens_first", [True, False])
@pytest.mark.parametrize("seq", [150, 40])
def test_right_kernels_pass_their_trial(
    kernel: str, dtype: torch.dtype, tokens_first: bool, seq: int
) -> None:
    call = CALL._replace(dtype=dtype, tokens_first=tokens_first, seq=seq)
    state = torch.get_rng_state()
    found = trial(operands(call, CPU), kernel)
    assert found.seconds > 0.0
    assert torch.equal(torch.get_rng_state(), state), "the job's random numbers are its own"


def test_heads_of_two_sizes_pass_their_trial() -> None:
    trial(operands(CALL._replace(head=48, kv_heads=4, tokens_first=False), CPU), "math")


def spoilt(place: int, spoil: Callable[[Tensor], Tensor]) -> Any:
    """Right results of `CALL`, of which one is spoilt: the output, or a gradient."""
    given = operands(CALL, CPU)
    out = F.scaled_dot_product_attention(*given[:3], is_causal=True, enable_gqa=True).transpose(1, 2)
    results = [
        out.flatten(2).detach(),
        *torch.autograd.grad(out.flatten(2), given[:3], given.pull, retain_graph=True),
    ]
    check(given, *results)
    results[place] = spoil(results[place].clone())
    return given, results


def _put(at: tuple[Any, ...], value: float) -> Callable[[Tensor], Tensor]:
    def spoil(x: Tensor) -> Tensor:
        x[at] = value
        return x

    return spoil


@pytest.mark.parametrize(
    ("place", "spoil"),
    [
        (0, lambda x: x * 1.05),
        (0, _put((1, slice(0, 20)), 0.0)),
        (0, _put((0, slice(130, 150)), 0.0)),
        (0, _put((1, 75, 3), torch.nan)),
        (1, lambda x: x * 0.95),
        (1, _put((0, 0, slice(0, 9)), 1.0)),
        (2, lambda x: x * 2),
        (2, _put((1, 1, slice(140, 150)), 1.0)),
        (3, lambda x: x.flip(1)),
        (3, _put((0, 1, 70), torch.inf)),
    ],
)
def test_wrong_results_and_gradients_fail_the_trial(place: int, spoil: Callable[[Tensor], Tensor]) -> None:
    given, results = spoilt(place, spoil)
    with pytest.raises(WrongResult):
        check(given, *results)


def test_attention_that_sees_later_tokens_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, is_causal, **kwargs: plain(*args, **kwargs)
    )
    with pytest.raises(WrongResult):
        trial(operands(CALL, CPU), "flash")


def calls_of(spec: ModelSpec, layout: str, has_masks: bool = False) -> Calls:
    spec = spec.model_copy(update={"seq": 64})
    return attention_calls(spec, parse_layout(f"precision=bf16,{layout}", spec), has_masks)


WINDOWED = LLAMA.model_copy(update={"attention_pattern": ("window", "full"), "window": 16})


@pytest.mark.parametrize(
    ("spec", "layout", "plain", "names_flash"),
    [
        (LLAMA, "mbs=2", {(2, 8, 4, 64, 8, 8, True): 4}, False),
        (LLAMA, "tp=8,mbs=2", {(2, 1, 1, 64, 8, 8, True): 4}, False),
        (LLAMA, "cp=8,cp_form=all_to_all", {(1, 1, 1, 64, 8, 8, True): 4}, False),
        (LLAMA, "cp=2,cp_form=all_gather", {}, True),
        (LLAMA, "cp=2,cp_form=ring", {}, True),
        (MODELS["deepseek"], "tp=2", {(1, 2, 2, 64, 24, 12, False): 4}, False),
        (MODELS["deepseek"], "cp=2,cp_form=all_to_all", {(1, 2, 2, 64, 24, 24, True): 4}, False),
        (WINDOWED, "mbs=1", {(1, 8, 4, 64, 8, 8, True): 2}, True),
        (WINDOWED.model_copy(update={"window": 64}), "mbs=1", {(1, 8, 4, 64, 8, 8, True): 4}, False),
        (
            WINDOWED.model_copy(update={"attention_pattern": ("chunk", "full"), "window": 24}),
            "mbs=1",
            {(3, 8, 4, 24, 8, 8, True): 2, (1, 8, 4, 64, 8, 8, True): 2},
            False,
        ),
        (LLAMA.model_copy(update={"attention_sinks": True}), "mbs=1", {}, True),
    ],
)
def test_calls_are_those_whose_kernel_pytorch_chooses(
    spec: ModelSpec, layout: str, plain: dict[tuple[int, ...], int], names_flash: bool
) -> None:
    found = calls_of(spec, layout)
    assert {(*call[:6], call.tokens_first): count for call, count in found.plain.items()} == plain
    assert {call.dtype for call in found.plain} <= {torch.bfloat16}
    assert found.names_flash == names_flash


def test_masks_of_documents_leave_the_choice_to_pytorch() -> None:
    assert not calls_of(LLAMA, "mbs=1", has_masks=True).plain


class _Package:
    """FlashAttention 3, as PyTorch knows it."""

    def __init__(self, fails: bool = False) -> None:
        self.active, self.fails = False, fails

    def register(self) -> _Package:
        if self.fails:
            raise RuntimeError("it exposes no kernels")
        self.active = True
        return self

    def remove(self) -> None:
        self.active = False


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> _Package:
    """A package that can be activated."""
    package = _Package()
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: package.register())
    return package


def _order() -> list[int]:
    return list(torch._C._get_sdp_priority_order())


def cache_key() -> Any:
    """The compiler's own part of the key of a cached graph."""
    return FxGraphHashDetails(None, (), {}, ()).cache_key_tag  # type: ignore[arg-type, typeddict-item]


@pytest.mark.oldest
def test_a_choice_is_first_in_pytorchs_order_and_in_the_keys_of_compiled_layers(fa3: _Package) -> None:
    before, key = _order(), cache_key()
    backend = nn.attention.SDPBackend
    PREFERENCE.use("cudnn")
    assert _order()[0] == backend.CUDNN_ATTENTION.value and sorted(_order()) == sorted(before)
    cudnn_key = cache_key()
    assert "cudnn" in cudnn_key and cudnn_key != key
    PREFERENCE.use("efficient")
    assert _order()[0] == backend.EFFICIENT_ATTENTION.value and cache_key() not in (key, cudnn_key)
    PREFERENCE.use("fa3")
    assert _order()[0] == backend.FLASH_ATTENTION.value and fa3.active
    PREFERENCE.use(None)
    assert (_order(), cache_key(), fa3.active) == (before, key, False)


@pytest.mark.oldest
def test_a_trial_leaves_pytorchs_kernels_as_they_were(fa3: _Package) -> None:
    before = nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    with only("fa3"):
        assert fa3.active
        assert nn.attention._cur_sdpa_kernel_backends() == [nn.attention.SDPBackend.FLASH_ATTENTION]
    assert not fa3.active
    fa3.fails = True
    with pytest.raises(RuntimeError, match="no kernels"), only("fa3"):
        raise AssertionError("it cannot be used")
    with pytest.raises(RuntimeError), only("cudnn"):
        F.scaled_dot_product_attention(*operands(CALL, CPU)[:3], enable_gqa=True)
    assert nn.attention._cur_sdpa_kernel_backends(with_priority=True) == before


def test_packages_are_offered_on_their_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_switches, "find_spec", lambda name: SimpleNamespace())
    for capability, more in (((8, 0), []), ((9, 0), ["fa3"]), ((10, 0), ["fa4"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=capability: it)
        assert offered_kernels(CPU, True) == ["flash", "cudnn", "efficient", *more]
        assert offered_kernels(CPU, False) == ["flash", "cudnn", "efficient"]
    monkeypatch.setattr(attention_switches, "find_spec", lambda name: None)
    assert offered_kernels(CPU, True) == ["flash", "cudnn", "efficient"]


def test_a_kernel_that_is_asked_for_and_does_not_run_is_refused_in_one_line() -> None:
    calls = Calls(Counter({CALL: 4}), names_flash=False)
    with pytest.raises(
        InputError, match=r"--attention-kernel cudnn: it does not run .*; give another"
    ) as told:
        choose("cudnn", calls, CPU, [])
    assert "\n" not in str(told.value)
    chosen = choose("flash", calls, CPU, [])
    assert chosen.kernel == "flash" and chosen.line.startswith("attention kernel: flash, ")
    kept = choose("auto", calls, CPU, ["math", "cudnn"])
    assert kept.kernel in (None, "math") and bool(kept.line) == (kept.kernel is not None)


def test_a_cpu_has_one_kernel_and_tries_none(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = parse_layout("mbs=1", LLAMA)
    assert use_attention("auto", LLAMA, layout, CPU) == ""
    assert PREFERENCE.kernel is None
    for name in ATTENTION_KERNELS[1:]:
        with pytest.raises(
            InputError, match=f"--attention-kernel {name}: device cpu has one kernel; leave it out"
        ):
            use_attention(name, LLAMA, layout, CPU)
    with pytest.raises(InputError, match="--attention-kernel fa2: choose one of auto, flash"):
        TrainingOptions(attention_kernel="fa2").check()


@pytest.mark.parametrize(
    ("layout", "asked", "message"),
    [
        ("cp=2,cp_form=ring", "cudnn", "no layer of this job has attention of whole sequences"),
        ("mbs=1", "fa3", "other layers of this job call PyTorch's flash kernel"),
    ],
)
def test_a_kernel_without_calls_or_in_place_of_another_is_refused(
    layout: str, asked: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InputError, match=f"--attention-kernel {asked}: {message}.*leave it out"):
        use_attention(asked, WINDOWED, parse_layout(layout, WINDOWED), torch.device("cuda", 0))


def test_ranks_share_the_choice_of_the_first_one(pool: WorkerPool) -> None:
    answers = pool.run(work.chosen, 2, None)
    assert {answer["kernel"] for answer in answers} == {"cudnn"}
    assert answers[0]["order"] == answers[1]["order"]
    assert len({answer["line"] for answer in answers}) == 1
    assert "cudnn, 1e+03 ms" in answers[0]["line"] and "PyTorch's flash takes 2e+03 ms" in answers[0]["line"]
    assert answers[0]["tried"] == ["flash", "cudnn"] and answers[1]["tried"] == []


def test_a_kernel_that_one_rank_cannot_use_is_used_by_none(pool: WorkerPool) -> None:
    answers = pool.run(work.chosen, 2, 1)
    assert {answer["kernel"] for answer in answers} == {None}
    assert {answer["line"] for answer in answers} == {
        "attention kernel: PyTorch's own choice, as rank 1 cannot use cudnn: no library"
    }
