"""Memory of layers whose experts FSDP2 wraps with them, beside FSDP2 on tensors without memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from costmodels.catalogue import load_device, load_engine
from costmodels.pricing import estimate
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from tests.costmodels.joined_experts import CHOSEN, EXPERTS, LAYERS, RANKS, TOKENS, WIDTH
from tests.support import ROOT
from tests.support.models import llama


def test_the_sums_of_a_layer_travel_beside_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "tests.costmodels.joined_experts"]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=True)
    model = llama(
        "experts",
        layers=LAYERS,
        hidden=WIDTH,
        ffn=WIDTH,
        heads=1,
        kv_heads=1,
        head_dim=8,
        vocab=8,
        seq=TOKENS,
        experts=EXPERTS,
        top_k=CHOSEN,
        expert_ffn=WIDTH,
    )
    device = load_device("a100-80g")
    cluster = Cluster(device=device, world_size=RANKS, devices_per_node=8, memory_bytes=device.memory_bytes)
    layout = Layout(
        data_parallel=RANKS,
        zero_stage=3,
        micro_batch_size=1,
        global_batch_size=RANKS,
        layers_per_stage=(LAYERS,),
        precision="bf16",
        recompute="full",
    )
    whole = {"sharding.narrow_stages": (3,), "allocator.workspace_bytes": 0.0, "loss.chunked": True}
    held = estimate(model, cluster, load_engine("fsdp").with_constants(whole), layout).memory[0]
    layer = 2 * EXPERTS * 3 * WIDTH**2
    assert (held.allocated - held.optimizer) / layer == pytest.approx(float(done.stdout), rel=0.1)
