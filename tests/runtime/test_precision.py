"""Number formats: fp16 with loss scaling, fp8, and the format in which gradients are summed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from costmodels import ModelSpec
from costmodels.errors import InputError
from runtime.dryrun.run import fake_process_group
from runtime.parallel.float8 import _product, check_float8
from runtime.parallel.mesh import build_grid
from runtime.settings.idle_flags import idle_flag_notes
from runtime.settings.loss_scale import LossScale, loss_scale_of
from runtime.settings.training_options import TrainingOptions
from runtime.train.stages import build_stage
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, MODELS
from tests.support.ranks import precision as work
from tests.support.ranks.parity import difference, losses_of, relative_difference
from tests.support.worker_pool import WorkerPool

OPTIONS = TrainingOptions(train_iters=16, lr=1e-3, lr_warmup_iters=4, initial_loss_scale=2.0**22)
"""So high a scale that the first steps overflow."""

LLAMA = MODELS["llama"]


def followed(scale: LossScale, steps: str) -> list[float]:
    """Values of the scale after steps that overflow (x) or do not (.)."""
    values = []
    for step in steps:
        scale.update(step == "x")
        values.append(scale.value)
    return values


def test_the_scale_halves_after_the_hysteresis_and_doubles_after_the_window() -> None:
    scale = LossScale(64.0, dynamic=True, minimum=8.0, window=3, hysteresis=2)
    # The first overflow is forgiven; the ones after it are not, even after good steps: Megatron-LM forgives
    # anew only once the scale has grown.
    assert followed(scale, "x..x.xx") == [64, 64, 64, 32, 32, 16, 8]
    assert followed(scale, "x") == [8]
    assert followed(scale, "...xx..") == [8, 8, 16, 16, 8, 8, 8]


@pytest.mark.parametrize("steps", ["", ".", "..", "x.", "x..", "xx.", "...x."])
def test_a_scale_goes_on_from_its_state_as_if_it_had_not_been_stored(steps: str) -> None:
    first, second = (LossScale(64.0, dynamic=True, minimum=8.0, window=3, hysteresis=2) for _ in range(2))
    followed(first, steps)
    second.load(first.state())
    assert second == first
    assert followed(second, "..x..xx....") == followed(first, "..x..xx....")


def test_a_constant_scale_stays() -> None:
    scale = LossScale(64.0, dynamic=False)
    assert followed(scale, "xxx" + "." * 2000) == [64.0] * 2003


def test_flags_choose_the_scale_of_fp16_only() -> None:
    fp16, bf16 = (parse_layout(f"precision={name}", LLAMA) for name in ("fp16", "bf16"))
    assert loss_scale_of(TrainingOptions(), fp16) == LossScale(2.0**16, dynamic=True)
    assert loss_scale_of(TrainingOptions(loss_scale=128.0), fp16) == LossScale(128.0, dynamic=False)
    given = TrainingOptions(initial_loss_scale=64.0, min_loss_scale=2.0, loss_scale_window=5, hysteresis=1)
    assert loss_scale_of(given, fp16) == LossScale(64.0, True, 2.0, 5, 1)
    assert loss_scale_of(given, bf16) is None
    # Scripts give a constant scale in bf16 too: it scales nothing, which is said.
    constant = TrainingOptions(loss_scale=4096.0)
    assert loss_scale_of(constant, bf16) is None
    told = ["--loss-scale 4096 has no effect: precision bf16 needs none"]
    assert idle_flag_notes(constant, spec=LLAMA, layout=bf16) == told
    assert not idle_flag_notes(constant, spec=LLAMA, layout=fp16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"loss_scale": 0.0}, "--loss-scale 0.0: must be positive"),
        ({"initial_loss_scale": float("inf")}, "--initial-loss-scale inf: must be positive"),
        ({"initial_loss_scale": 1.0, "min_loss_scale": 2.0}, "must be at least --min-loss-scale 2.0"),
        ({"loss_scale_window": 0}, "--loss-scale-window 0: must be at least 1"),
        ({"hysteresis": 0}, "--hysteresis 0: must be at least 1"),
        ({"compile": True, "no_compile": True}, "--compile and --no-compile exclude each other"),
    ],
)
def test_flags_that_cannot_be_trained_with(flags: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainingOptions(**flags).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["dp=2,zero=1", "tp=2,gradient_reduction=bf16", "pp=2"])
def test_fp16_follows_fp32_once_the_scale_fits(pool: WorkerPool, text: str) -> None:
    layout = parse_layout("gbs=4,precision=fp16," + text, LLAMA)
    batches = list(range(OPTIONS.train_iters))
    first, *others = pool.run(work.steps_of, 2, LLAMA, layout, OPTIONS, batches)
    # Compared as text: the gradient norm of a skipped step may be NaN.
    assert all(str(steps) == str(first) for steps in others)
    skipped = [step.skipped for step in first]
    assert skipped[:2] == [True, True] and sum(skipped) <= 8
    trained = [number for number in batches if not skipped[number]]
    [expected] = pool.run(work.steps_of, 1, LLAMA, parse_layout("gbs=4", LLAMA), OPTIONS, trained)
    for number, reference in zip(trained, expected, strict=True):
        step = first[number]
        assert step.loss == pytest.approx(reference.loss, rel=2e-3)
        assert step.grad_norm == pytest.approx(reference.grad_norm, rel=1e-2)
        # A skipped step does not advance the schedule.
        assert step.learning_rate == reference.learning_rate
    # The reported loss of a skipped step is that of the batch all the same.
    assert first[0].loss == pytest.approx(expected[0].loss, rel=0.1)


@pytest.mark.parametrize("name", ["mixtral", "further-tied"])
def test_what_losses_are_multiplied_by_does_not_show(pool: WorkerPool, name: str) -> None:
    """Neither in what is reported nor in updates: losses of routers and of further tokens have it too."""
    spec = (MODELS | FORMS)[name]
    settings: dict[str, Any] = {"train_iters": 2, "lr": 1e-2, "lr_decay_style": "constant"}
    settings |= {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}

    def steps(text: str, **more: Any) -> list[work.Step]:
        layout = parse_layout(f"gbs=4,{text}", spec)
        [found] = pool.run(work.steps_of, 1, spec, layout, TrainingOptions(**settings, **more), [0, 1])
        return list(found)

    plain, scaled = (steps("precision=fp16", loss_scale=scale) for scale in (1.0, 2.0**10))
    for one, other in zip(plain, scaled, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-2)
        assert other.further == pytest.approx(one.further, rel=1e-3)
    mean, summed = (steps("precision=fp32", loss_reduction=word)[0] for word in ("mean", "sum"))
    assert (summed.loss, summed.further) == (pytest.approx(mean.loss), pytest.approx(mean.further))
    assert summed.grad_norm == pytest.approx(4 * spec.seq * mean.grad_norm, rel=1e-5)
    assert len(mean.further) == spec.mtp_depths


def test_a_step_that_overflows_changes_nothing(pool: WorkerPool) -> None:
    options = TrainingOptions(train_iters=4, lr=1e-2, lr_warmup_iters=2, initial_loss_scale=2.0**16)
    layout = parse_layout("gbs=4,precision=fp16,dp=2,zero=1", LLAMA)
    for before, at, after, changed in pool.run(work.overflow, 2, LLAMA, layout, options):
        assert (before.skipped, at.skipped, after.skipped) == (False, True, False)
        assert changed == []
        assert at.learning_rate == after.learning_rate == options.learning_rate().at(1)
        assert at.loss == after.loss


def test_a_run_in_fp16_resumes_exactly_amid_its_overflows(pool: WorkerPool, tmp_path: Path) -> None:
    options = TrainingOptions(train_iters=12, lr=1e-2, initial_loss_scale=2.0**25, loss_scale_window=3)
    layout = parse_layout("gbs=4,precision=fp16,dp=2,zero=1", LLAMA)
    for save_at in (2, 8):
        folder = str(tmp_path / str(save_at))
        for uninterrupted, resumed in pool.run(
            work.resumed_steps, 2, LLAMA, layout, options, folder, save_at
        ):
            assert len(uninterrupted) == 12 - save_at
            assert str(resumed) == str(uninterrupted)
    assert len({step.loss_scale for step in uninterrupted}) > 1


@pytest.mark.parametrize("text", ["dp=2,zero=1", "dp=2", "mbs=1", "pp=2", "pp=2,schedule=zbv"])
def test_gradients_are_summed_in_the_format_that_the_layout_names(pool: WorkerPool, text: str) -> None:
    layouts = [
        parse_layout(f"gbs=8,precision=bf16,{text},gradient_reduction={name}", LLAMA)
        for name in ("fp32", "bf16")
    ]
    wide, narrow = (pool.run(work.gradients_of, one.world_size, LLAMA, one)[0] for one in layouts)
    fits = {name: torch.equal(g, g.bfloat16().float()) for name, g in narrow.items()}
    assert all(fits.values()), fits
    assert not any(torch.equal(g, g.bfloat16().float()) for g in wide.values())
    for name, gradient in narrow.items():
        assert gradient.dtype == wide[name].dtype == torch.float32
        assert float((gradient - wide[name]).norm() / wide[name].norm()) < 2**-6, name


RECIPES = ("rowwise", "tensorwise", "rowwise_with_gw_hp")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("text", ["", "dp=2,zero=3", "tp=2"])
def test_fp8_follows_bf16(pool: WorkerPool, text: str, recipe: str) -> None:
    if find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    layout = parse_layout(f"gbs=2,precision=fp8,fp8_recipe={recipe}" + ("," + text if text else ""), LLAMA)
    bf16 = layout.model_copy(update={"precision": "bf16", "fp8_recipe": "default"})
    losses = pool.run(losses_of, layout.world_size, LLAMA, layout, 6)
    expected = pool.run(losses_of, layout.world_size, LLAMA, bf16, 6)
    assert all(one == losses[0] for one in losses)
    assert 1e-5 < relative_difference(losses[0], expected[0]) < 2e-2


@pytest.mark.oldest
def test_recipes_differ_and_tensorwise_is_the_default(pool: WorkerPool) -> None:
    if find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    layout = parse_layout("gbs=2,precision=fp8", LLAMA)
    losses = {
        recipe: pool.run(losses_of, 1, LLAMA, layout.model_copy(update={"fp8_recipe": recipe}), 3)[0]
        for recipe in ("default", *RECIPES)
    }
    assert losses["default"] == losses["tensorwise"]
    assert len({str(losses[recipe]) for recipe in RECIPES}) == len(RECIPES)


@pytest.mark.oldest
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_multiplies_in_the_blocks_where_the_shapes_allow_it(recipe: Any) -> None:
    if find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    from runtime.model.transformer import Transformer
    from runtime.parallel.float8 import float8

    spec = ModelSpec(name="odd", layers=1, hidden=32, heads=2, ffn=40, vocab=64, seq=16)
    stage = Transformer(spec, 64).bfloat16()
    float8(stage, recipe)
    converted = [name for name, module in stage.named_modules() if hasattr(module, "product")]
    assert converted == [f"layers.0.attention.{name}" for name in ("query", "key", "value", "output")]
    linear = stage.get_submodule("layers.0.attention.query")
    assert isinstance(linear, torch.nn.Linear)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    result = linear(x)
    result.float().square().sum().backward()
    exact = torch.nn.functional.linear(x, linear.weight, linear.bias).detach()
    assert result.dtype == torch.bfloat16
    assert 0 < float((result.detach() - exact).norm() / exact.norm()) < 0.1
    assert x.grad is not None and linear.weight.grad is not None and linear.bias.grad is not None


@pytest.mark.parametrize(("head", "odd"), [(16, ()), (24, ("keys",)), (8, ("keys",))])
def test_fp8_multiplies_by_heads_that_ranks_share_as_they_join_them(head: int, odd: tuple[str, ...]) -> None:
    pytest.importorskip("torchao")
    spec = ModelSpec(
        name="shared",
        layers=1,
        hidden=64,
        ffn=128,
        heads=8,
        kv_heads=2,
        head_dim=head,
        vocab=64,
        seq=16,
        gated=True,
        activation="silu",
    )
    layout = parse_layout("gbs=1,tp=4,precision=fp8", spec)
    with fake_process_group(4, 0):
        grid = build_grid(spec, layout, torch.device("cpu"))
        (block,) = build_stage(spec, layout, grid, 0, compiled=False).blocks
        products = {
            name.split(".")[-1]: getattr(module, "product", torch.nn.functional.linear)
            for name, module in block.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
    exact = {name for name, product in products.items() if product is torch.nn.functional.linear}
    assert exact == ({"key", "value"} if odd else set())


def test_fp8_is_refused_where_the_device_cannot_multiply_in_it() -> None:
    with pytest.raises(InputError, match=r"precision fp8: device cpu has no fp8 .*; pin precision=bf16"):
        check_float8(torch.device("cpu"))


def test_layers_are_compiled_on_gpus_and_on_demand() -> None:
    usual, split = parse_layout("pp=2", LLAMA), parse_layout("pp=2,schedule=zbv", LLAMA)
    assert TrainingOptions().compiles(usual, on_gpu=True)
    assert not TrainingOptions().compiles(usual, on_gpu=False)
    assert not TrainingOptions(no_compile=True).compiles(usual, on_gpu=True)
    assert TrainingOptions(compile=True).compiles(usual, on_gpu=False)
    assert not TrainingOptions().compiles(split, on_gpu=True)
    with pytest.raises(InputError, match="--compile: schedule zbv splits backward"):
        TrainingOptions(compile=True).compiles(split, on_gpu=True)


@pytest.mark.parametrize(
    "text",
    [
        "gbs=4",
        "gbs=4,mbs=2,gradient_reduction=bf16,recompute=full",
        "gbs=4,tp=2,sp=1",
        "pp=2",
        "pp=2,schedule=zbv",
        "gbs=8,dp=2",
        "gbs=4,dp=2,cp=2",
        "gbs=8,dp=2,mbs=2,gradient_reduction=bf16,recompute=full",
        "gbs=4,dp=2,tp=2,sp=1",
        "gbs=4,dp=2,tp=2,ep=2",
        "gbs=8,dp=2,pp=2",
        "gbs=8,dp=2,pp=2,schedule=zbv",
        "gbs=4,mbs=2,recompute=full,precision=fp8,fp8_recipe=tensorwise",
        "gbs=8,dp=2,tp=2,sp=1,precision=fp8,fp8_recipe=tensorwise",
        "gbs=4,dp=2,tp=2,ep=2,precision=fp8,fp8_recipe=tensorwise",
    ],
)
def test_ranks_that_split_no_parameters_train_as_under_fsdp(pool: WorkerPool, text: str) -> None:
    """To the bit where both sum in one order: fp8 weights that are cast once a step, or at each GEMM."""
    if "fp8" in text:
        pytest.importorskip("torchao")
    spec = MODELS["gpt2" if "pp" in text else "mixtral" if "ep=2" in text else "llama"]
    layout = parse_layout(text if "precision" in text else f"{text},precision=bf16", spec)
    # With split backward, FSDP2 adds up weight gradients in 16 bits before it converts them.
    apart = 1e-2 if "zbv" in text else 1e-6
    for plain, wrapped in pool.run(work.with_and_without_fsdp, layout.world_size, spec, layout, 4):
        assert difference([plain], wrapped).largest < apart


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_products_in_8_bits_add_their_bias(recipe: Any) -> None:
    if recipe != "mxfp8":
        pytest.importorskip("torchao")
    product = _product(recipe)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*sides, generator=generator) for sides in ((2, 32, 64), (32, 64)))
    bias = torch.randn(32, generator=generator).requires_grad_()
    found, plain = product(x, weight, bias), product(x, weight, None)
    torch.testing.assert_close(found, plain + bias)
    pull = torch.randn(found.shape, generator=generator)
    [gradient] = torch.autograd.grad(found, bias, pull)
    torch.testing.assert_close(gradient, pull.sum((0, 1)))
