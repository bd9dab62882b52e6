"""One question to other analytical tools, if they are installed.

Calculon (SC'23, github.com/calculon-ai/calculon) searches by itself, through its command `calculon
llm-optimal-execution`, on a system file of its repository. llm-analysis (0.2, the package of that name) takes
one layout at a time: a loop asks it for every split of the devices that its degrees allow. Both know GPT with
as many key/value heads as heads. Galvatron needs profiles of the user's own devices, so it cannot be used
without them.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from planner.space.rule import divisors


@dataclass(frozen=True)
class Asked:
    """The effort of another tool's search."""

    tool: str
    layouts: int
    """Number of priced layouts, including those that do not fit."""
    seconds: float


def calculon(model: ModelSpec, cluster: Cluster, batch: int, system: str | None) -> Asked | None:
    """Calculon's search on one process; None if it or the system file is missing.

    Raises `subprocess.CalledProcessError` if the command fails.
    """
    command = shutil.which("calculon")
    if command is None or system is None:
        return None
    application = {
        "hidden": model.hidden,
        "feedforward": model.ffn,
        "seq_size": model.seq,
        "attn_heads": model.heads,
        "attn_size": model.head_dim,
        "num_blocks": model.layers,
    }
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "application.json"
        described.write_text(json.dumps(application))
        words = [command, "llm-optimal-execution", str(described), str(cluster.world_size), str(batch)]
        words += ["float16", system, str(Path(folder) / "best.json"), "--cpus", "1"]
        started = time.perf_counter()
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - started
    counted = re.search(r"Total executions: (\d+)", done.stdout + done.stderr)
    return Asked("calculon", int(counted.group(1)) if counted else 0, seconds)


def llm_analysis(model: ModelSpec, cluster: Cluster, batch: int) -> Asked | None:
    """llm-analysis in a loop over its degrees; None if it is not installed."""
    if find_spec("llm_analysis") is None:
        return None
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig

    device = cluster.device
    spec = ModelConfig(
        name=model.name,
        num_layers=model.layers,
        n_head=model.heads,
        hidden_dim=model.hidden,
        vocab_size=model.vocab,
        max_seq_len=model.seq,
        ffn_embed_dim=model.ffn,
    )
    gpu = GPUConfig(
        name=device.name,
        mem_per_GPU_in_GB=device.memory_bytes / 1e9,
        hbm_bandwidth_in_GB_per_sec=device.memory_bandwidth / 1e9,
        intra_node_bandwidth_in_GB_per_sec=device.intra_node.bandwidth / 1e9,
        intra_node_min_message_latency=device.intra_node.latency,
        peak_fp16_TFLOPS=device.peak_flops["bf16"] / 1e12,
        inter_node_bandwidth_in_GB_per_sec=device.inter_node.bandwidth / 1e9,
    )
    meshes = [
        (tp, pp, cluster.world_size // (tp * pp))
        for tp in divisors(cluster.world_size)
        for pp in divisors(cluster.world_size // tp)
        if model.heads % tp == 0 and model.layers % pp == 0
    ]
    logging.disable(logging.CRITICAL)  # llm-analysis reports every layout at length.
    layouts, started = 0, time.perf_counter()
    for (tp, pp, dp), again, zero in product(meshes, ActivationRecomputation, DSZeRO):
        for micro_batch in divisors(batch):
            if batch % (micro_batch * dp):
                continue
            parallel = ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=dp, sp_size=tp)
            analysis = LLMAnalysis(spec, gpu, DtypeConfig(), parallel, flops_efficiency=0.5)
            try:
                analysis.training(
                    batch_size_per_gpu=micro_batch,
                    global_batch_size=batch,
                    seq_len=model.seq,
                    total_num_tokens=batch * model.seq,
                    activation_recomputation=again,
                    ds_zero=zero,
                )
            except AssertionError:
                continue  # Degrees that it does not combine.
            layouts += 1
    return Asked("llm-analysis", layouts, time.perf_counter() - started)
