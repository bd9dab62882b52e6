"""Rotary frequencies against closed forms, and against those of Hugging Face transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.errors import InputError
from costmodels.spec.model_parts import RopeScaling
from runtime.model.rotary import ROPE_KINDS, frequencies, rotary_table, rotate, score_factor, table_factor

LLAMA31 = RopeScaling(kind="llama3", factor=8.0, original_positions=8192)
DEEPSEEK_V2 = RopeScaling(
    kind="yarn", factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707
)


def test_plain_angles_are_positions_times_powers_of_the_base() -> None:
    positions = torch.tensor([0, 3, 70])
    cos, sin = rotary_table(positions, 8, 100.0, None)
    assert cos.dtype == sin.dtype == torch.float32
    for row, position in enumerate((0, 3, 70)):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            for column in (pair, pair + 4):
                assert cos[row, column] == pytest.approx(math.cos(angle), abs=1e-5)
                assert sin[row, column] == pytest.approx(math.sin(angle), abs=1e-5)


def test_rotating_by_positions_leaves_scores_to_their_distance() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(1))
    for scaling in (None, LLAMA31, DEEPSEEK_V2):
        cos, sin = rotary_table(torch.tensor([5, 2, 905, 902]), 16, 10000.0, scaling)
        turned = rotate(q.expand(1, 1, 4, 16), cos, sin), rotate(k.expand(1, 1, 4, 16), cos, sin)
        scores = turned[0][0, 0] @ turned[1][0, 0].T
        torch.testing.assert_close(scores[0, 1], scores[2, 3], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(scores[0, 1], scores[1, 0], rtol=1e-2)


def test_linear_scaling_divides_positions() -> None:
    scaled = rotary_table(torch.arange(0, 40, 4), 16, 500.0, RopeScaling(kind="linear", factor=4.0))
    torch.testing.assert_close(scaled, rotary_table(torch.arange(10), 16, 500.0, None))


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = frequencies(128, 500000.0, None)
    scaled = frequencies(128, 500000.0, LLAMA31)
    waves = 2 * math.pi / plain
    short, long = waves < 8192 / 4, waves > 8192
    assert short.any() and long.any() and not (short | long).all()
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = ~(short | long)
    # Halfway between 1 and 4 waves within 8192 positions, half of either.
    kept = (8192 / waves[between] - 1) / 3
    torch.testing.assert_close(scaled[between], plain[between] * (kept + (1 - kept) / 8))


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain, scaled = frequencies(64, 10000.0, None), frequencies(64, 10000.0, DEEPSEEK_V2)
    turns = 4096 * plain / (2 * math.pi)
    # The bounds of the ramp are rounded outwards, by up to one pair.
    step = 10000.0 ** (2 / 64)
    assert (turns > 32 * step).any() and (turns < 1 / step).any()
    torch.testing.assert_close(scaled[turns > 32 * step], plain[turns > 32 * step])
    torch.testing.assert_close(scaled[turns < 1 / step], plain[turns < 1 / step] / 40)
    between = (turns < 32 / step) & (turns > step)
    ratio = (scaled / plain)[between]
    # A straight ramp over the pairs: equal steps down.
    torch.testing.assert_close(ratio.diff(), (ratio[1] - ratio[0]).expand(len(ratio) - 1), atol=1e-5, rtol=0)
    assert (ratio.diff() < 0).all()


def test_yarn_factors() -> None:
    plain = RopeScaling(kind="yarn", factor=16.0, original_positions=4096)
    assert table_factor(plain) == pytest.approx(0.1 * math.log(16) + 1)
    assert score_factor(plain) == 1.0
    assert table_factor(plain.model_copy(update={"attention_factor": 1.25})) == 1.25
    assert table_factor(DEEPSEEK_V2) == 1.0
    # arXiv:2405.04434, section 3.1.4: sqrt(t) = 0.0707 ln s + 1, on queries and keys.
    assert score_factor(DEEPSEEK_V2) == pytest.approx((0.0707 * math.log(40) + 1) ** 2)
    assert table_factor(LLAMA31) == table_factor(None) == score_factor(None) == 1.0
    assert table_factor(plain.model_copy(update={"factor": 0.5})) == 1.0


def test_llama3_with_one_factor_keeps_or_stretches_every_wave() -> None:
    # Llama 4 Scout: nothing lies between.
    plain = frequencies(128, 500000.0, None)
    one = RopeScaling(
        kind="llama3", factor=16.0, original_positions=8192, low_freq_factor=1.0, high_freq_factor=1.0
    )
    scaled, stretched = frequencies(128, 500000.0, one), 2 * math.pi / plain > 8192
    assert stretched.any() and not stretched.all()
    torch.testing.assert_close(scaled, torch.where(stretched, plain / 16, plain))


def test_an_unknown_kind_is_refused() -> None:
    scaling = RopeScaling(kind="longrope", factor=4.0)
    with pytest.raises(InputError, match="'longrope' can be planned, not trained") as error:
        rotary_table(torch.arange(4), 8, 10000.0, scaling)
    assert "\n" not in str(error.value)


scalings = st.builds(
    RopeScaling,
    kind=st.sampled_from(sorted(ROPE_KINDS)),
    factor=st.floats(1.0, 64.0),
    original_positions=st.integers(16, 32768),
    low_freq_factor=st.floats(0.5, 2.0),
    high_freq_factor=st.floats(2.5, 8.0),
    beta_fast=st.floats(8.0, 64.0),
    beta_slow=st.floats(0.5, 4.0),
    mscale=st.sampled_from([0.0, 0.707, 1.0, 1.5]),
    mscale_all_dim=st.sampled_from([0.0, 0.707, 1.0]),
    attention_factor=st.sampled_from([0.0, 1.3]),
    truncate=st.booleans(),
)


def as_hugging_face(scaling: RopeScaling) -> dict[str, Any]:
    """The fields as the keys of `rope_scaling`; zeros stand for keys that are left out."""
    fields = scaling.model_dump(exclude={"kind", "original_positions"})
    keys = {name: value for name, value in fields.items() if value not in (0.0,) or name == "truncate"}
    return keys | {
        "rope_type": scaling.kind,
        "original_max_position_embeddings": scaling.original_positions,
    }


@pytest.mark.slow
@given(scaling=scalings, half=st.integers(2, 64), theta=st.floats(100.0, 1e7))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_frequencies_are_those_of_transformers(scaling: RopeScaling, half: int, theta: float) -> None:
    # Earlier versions do not know all fields of YaRN.
    transformers = pytest.importorskip("transformers", minversion="4.55")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=2 * half,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=65536,
        rope_theta=theta,
        rope_scaling=as_hugging_face(scaling),
    )
    expected, factor = utils.ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
    torch.testing.assert_close(frequencies(2 * half, theta, scaling), expected, rtol=2e-5, atol=1e-9)
    assert table_factor(scaling) == pytest.approx(factor)


def test_heads_in_16_bits_are_turned_in_fp32_and_rounded_once() -> None:
    cos, sin = rotary_table(torch.arange(900, 932), 8, 10000.0, None)
    x = torch.randn(2, 3, 32, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, exact = rotate(x, cos, sin), rotate(x.double(), cos, sin)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())
    # Half of each pair is four elements on, and what has no pair stays.
    one, other = x.double()[..., :4], x.double()[..., 4:8]
    angle = torch.arange(900, 932).double()[:, None] * 10000.0 ** (-torch.arange(4).double() / 4)
    turned = torch.cat((one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()), -1)
    torch.testing.assert_close(exact[..., :8].double(), turned, rtol=1e-3, atol=1e-3)
    assert torch.equal(found[..., 8:], x[..., 8:])
