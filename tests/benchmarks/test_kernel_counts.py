"""Kernels of a layer, counted without a GPU."""

from __future__ import annotations

import pytest

from benchmarks import kernel_counts
from benchmarks.kernel_counts import counts
from costmodels.catalogue import load_model

pytestmark = pytest.mark.oldest


@pytest.mark.slow
def test_kernels_are_those_of_the_layers_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of gpt2-small has six matrices, and three GEMMs of each: one adds to a sum in fp32. Gradients
    of vectors are added apart."""
    monkeypatch.setitem(kernel_counts.CASES, "gpt2-small", (2, 128))
    found = counts("gpt2-small", "bf16")["microbatch"]
    width = load_model("gpt2-small").hidden
    tokens, weights = 2 * 128, 12 * width**2
    # In and out of each matrix: queries, keys, values and the output, and the two of the MLP.
    activations = tokens * (4 * 2 + 2 * 5) * width
    biases = (4 + 4 + 1) * width
    assert found["GEMM"] == [18, 2 * (3 * activations + 2 * weights + biases) + (4 + 4) * weights]
    # The norms of attention and of the MLP have two each.
    vectors = 4 * width + biases
    assert found["additions of gradients"] == [6 + 4, (2 + 4 + 4) * vectors]


@pytest.mark.slow
def test_products_in_8_bits_read_a_byte_for_each_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are cast once a step: read for the scale and for the cast, and written in both orientations."""
    pytest.importorskip("torchao")
    monkeypatch.setitem(kernel_counts.CASES, "gpt2-small", (2, 128))
    found = counts("gpt2-small", "fp8")
    width = load_model("gpt2-small").hidden
    tokens, weights = 2 * 128, 12 * width**2
    activations = tokens * (4 * 2 + 2 * 5) * width
    # Each matrix is read by two products, and the third adds to a sum in fp32. Forward adds biases, too.
    scales, biases = 18 * 2 * 4, 2 * (4 + 4 + 1) * width
    moved = 4 * activations + (2 + 4 + 4) * weights
    assert found["microbatch"]["GEMM"] == [18, moved + scales + biases]
    # Masters of 32 bits. A matrix that is written over counts as read, too.
    cast = found["step"]["casts to 8 bits"][1]
    assert cast == pytest.approx((4 + 4 + 2 * 2) * weights, rel=1e-3)
    # The first sum of a step is not read.
    assert found["step"]["GEMM"] == [0, -4 * weights]
