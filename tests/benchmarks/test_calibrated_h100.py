"""Kernel times of a file, as calibration measures them."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.calibrated_h100 import LAUNCH_S, engine_of, kernel_measurements
from benchmarks.calibration.measurements import read_measurements
from costmodels.catalogue import load_device, load_engine
from costmodels.errors import InputError

HEAD = "op,dtype,m,n,k,extra,seconds,tflops_or_gbs\n"

KERNELS = """gemm_nt,bfloat16,1024,3072,768,,1e-4,
gemm_nn_dgrad,bfloat16,1024,768,3072,,2e-4,
gemm_tn_wgrad,bfloat16,3072,768,1024,,3e-4,
gemm_nt,float32,1024,3072,768,,9e-4,
gemm_nt,bfloat16,64,64,64,,1e-4,
sdpa_fwd_causal,bfloat16,8,4,1024,d=64 kv=4,1e-4,
sdpa_bwd_causal,bfloat16,8,4,1024,d=64 kv=4,3e-4,
copy,bfloat16,1000,,,,1e-4,100
copy,bfloat16,100000,,,,1e-4,3000
h2d pinned,,1000,,,,1e-3,55
fused_adamw fp32,,500,,,,5e-3,
"""


def test_gradients_of_a_product_are_found_by_its_sizes(tmp_path: Path):
    file = tmp_path / "kernels.csv"
    file.write_text(HEAD + KERNELS)
    found = kernel_measurements(file, load_device("h100"), load_engine("bundled"))
    (product,) = found.products  # The other one has no gradients, a third is of another number format.
    assert (product.m, product.k, product.n) == (1024, 768, 3072)
    assert product.forward_s == pytest.approx(1e-4 - LAUNCH_S)
    assert product.backward_s == pytest.approx(5e-4 - 2 * LAUNCH_S)
    (attention,) = found.attention
    assert (attention.batch, attention.heads, attention.seq, attention.head_dim) == (8, 4, 1024, 64)
    assert (found.copy_bytes_per_s, found.host_bytes_per_s) == (3e12, 55e9)
    assert found.update_s == pytest.approx(1e-5)


def test_a_file_of_something_else_is_refused_in_one_line(tmp_path: Path):
    device, engine = load_device("h100"), load_engine("bundled")
    with pytest.raises(InputError, match=r"kernels none\.csv: No such file"):
        kernel_measurements(Path("none.csv"), device, engine)
    file = tmp_path / "kernels.csv"
    file.write_text(HEAD + KERNELS.replace("d=64 kv=4,3e-4", "kv=4,3e-4"))
    with pytest.raises(InputError, match="names no head size"):
        kernel_measurements(file, device, engine)


COLUMNS = (
    "source_id,model_name,layers,hidden,ffn,heads,kv_heads,vocab,seq,moe_experts,topk,gpu,gpus,gpus_per_node,"
    "tp,pp,dp,ep,mbs,gbs,recompute,zero_stage,precision,flash,step_time_s\n"
)

ROWS = """bundled_h100,llama3-8b,8,4096,14336,32,8,128256,8192,,,H100-80GB,1,1,1,1,1,1,1,1,none,0,bf16,1,0.29
bundled_h100,mixtral-8x7b,2,4096,14336,32,8,32000,4096,8,2,H100-80GB,1,1,1,1,1,1,1,4,none,0,bf16,1,0.3
"""


def test_dense_rows_and_rows_with_experts_have_one_engine_on_one_device(tmp_path: Path):
    file = tmp_path / "rows.csv"
    file.write_text(COLUMNS + ROWS)
    dense, mixture = read_measurements(file)[0]
    assert mixture.model.experts and dense.engine != mixture.engine
    assert engine_of([dense, mixture], file) == mixture.engine
    other = dataclasses.replace(dense, engine=load_engine("megatron"))
    with pytest.raises(InputError, match="expected one engine in all rows"):
        engine_of([other, mixture], file)
