"""Reports of a run: Megatron-LM's log line, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import math
import resource
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from costmodels import Cluster, Layout, ModelSpec
from costmodels.spec.model_flops import flops_per_sequence
from planner.history.step_parts import StepParts
from runtime.logs.console import say
from runtime.logs.line_file import LineFile
from runtime.logs.metrics_file import drop_metrics_after
from runtime.logs.trackers import Trackers
from runtime.parallel.accelerator import device_module, is_accelerator
from runtime.train.balance import Load

LOG_LINE_ONLY = ("nan_iterations", "loss_scale", "skipped_iterations")
"""Metrics that metrics.jsonl leaves out."""


ROUTER_LOSSES = ("load_balancing_loss", "z_loss")
"""Megatron-LM's names of the losses that balance experts."""


def loss_of_updates(losses: torch.Tensor, updated: Sequence[int]) -> float:
    """The mean loss of the steps that changed the weights, as in Megatron-LM; of all steps where none did."""
    return float((losses[list(updated)] if updated else losses).mean())


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this rank: allocated tensors on a GPU, the process on a CPU."""
    if is_accelerator(device):
        return int(device_module(device).max_memory_allocated(device))
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def largest_of_ranks(held: int, device: torch.device) -> int:
    """The largest value of all ranks, in bytes; every rank calls it."""
    largest = torch.tensor(float(held), dtype=torch.float64).to(device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def throughput(
    spec: ModelSpec, layout: Layout, cluster: Cluster, sequences_per_s: float
) -> dict[str, float | None]:
    """Tokens per second of the job, model TFLOP/s and MFU of one device."""
    flops = flops_per_sequence(spec) * sequences_per_s / layout.world_size
    peak = cluster.device.peak_flops.get(layout.precision)
    return {
        "tokens_per_s": sequences_per_s * spec.seq,
        "tflops_per_device": flops / 1e12,
        "mfu": flops / peak if peak else None,
    }


def expert_metrics(load: Load) -> dict[str, Any]:
    """The entries of a record about experts, without entries that do not apply.

    `expert_load` has a number for each expert of each layer: about 100 KB per line for 58 layers of 256
    experts.
    """
    values = {
        "expert_load": {
            str(layer): [round(share, 4) for share in shares] for layer, shares in load.shares.items()
        },
        "load_balancing_loss": load.balancing_loss,
        "z_loss": load.z_loss,
        "dropped_share": load.dropped,
    }
    return {name: value for name, value in values.items() if value is not None}


def log_line(
    metrics: Mapping[str, Any],
    train_iters: int,
    consumed_samples: int,
    global_batch_size: int,
    now: datetime,
    on_gpu: bool = True,
) -> str:
    """One line in Megatron-LM's format, for tools that parse its logs; on a CPU without TFLOP/s."""
    iteration = metrics["iteration"]
    rate = f" throughput per GPU (TFLOP/s/GPU): {metrics['tflops_per_device']:.1f} |" if on_gpu else ""
    return (
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{train_iters:8d} |"
        f" consumed samples: {consumed_samples:12d} |"
        f" elapsed time per iteration (ms): {metrics['step_time_s'] * 1e3:.1f} |"
        f"{rate}"
        f" learning rate: {metrics['learning_rate']:.6E} |"
        f" global batch size: {global_batch_size:5d} |"
        f" lm loss: {metrics['loss']:.6E} |"
        f"{_further_words(metrics)}"
        f"{_expert_words(metrics)}"
        f" loss scale: {metrics['loss_scale']:.1f} |"
        f" grad norm: {metrics['grad_norm']:.3f} |"
        f" number of skipped iterations: {metrics['skipped_iterations']:3d} |"
        f" number of nan iterations: {metrics['nan_iterations']:3d} |"
    )


def _further_words(metrics: Mapping[str, Any]) -> str:
    """Losses of multi-token prediction, as Megatron-LM names them."""
    losses = enumerate(metrics.get("mtp_losses", ()), start=1)
    return "".join(f" mtp_{depth} loss: {loss:.6E} |" for depth, loss in losses)


def _expert_words(metrics: Mapping[str, Any]) -> str:
    """Losses of routers with Megatron-LM's names, and the load of the fullest expert of any layer."""
    words = ""
    for name in ROUTER_LOSSES:
        if name in metrics:
            words += f" {name}: {metrics[name]:.6E} |"
    if "expert_load" in metrics:
        words += f" fullest expert: {max(map(max, metrics['expert_load'].values())):.2f} |"
    return words


def evaluation_line(iteration: int, loss: float, split: str = "validation") -> str:
    """Megatron-LM's line of an evaluation."""
    perplexity = math.exp(min(20.0, loss))
    return (
        f" {split} loss at iteration {iteration} | lm loss value: {loss:.6E} |"
        f" lm loss PPL: {perplexity:.6E} |"
    )


class Recorder:
    """A writer of metrics.jsonl and TensorBoard events; one rank of a job has one."""

    def __init__(
        self,
        log_dir: str | None,
        tensorboard_dir: str | None,
        resumed_at: int,
        trackers: Trackers | None = None,
    ) -> None:
        self.trackers = Trackers({}) if trackers is None else trackers
        self.file = None if log_dir is None else LineFile(drop_metrics_after(log_dir, resumed_at))
        self.board = None
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = _quiet_writer
            with self._board_may_fail():
                self.board = SummaryWriter(tensorboard_dir, purge_step=resumed_at + 1)

    def step(self, metrics: Mapping[str, Any], consumed_samples: int, global_batch_size: int) -> None:
        """Record one logged training step."""
        self._write({name: value for name, value in metrics.items() if name not in LOG_LINE_ONLY})
        self.trackers.log(metrics, metrics["iteration"])
        tags = {
            "lm loss": metrics["loss"],
            "learning-rate": metrics["learning_rate"],
            "grad-norm": metrics["grad_norm"],
            "loss-scale": metrics["loss_scale"],
            "batch-size": global_batch_size,
            "iteration-time": metrics["step_time_s"],
            "throughput": metrics["tflops_per_device"],
            "mem-max-allocated-bytes": metrics["peak_memory_bytes"],
        }
        for name in ROUTER_LOSSES:
            if name in metrics:
                tags[name] = metrics[name]
        for depth, loss in enumerate(metrics.get("mtp_losses", ()), start=1):
            tags[f"mtp_{depth} loss"] = loss
        for layer, shares in metrics.get("expert_load", {}).items():
            tags[f"fullest expert/layer {layer}"] = max(shares)
        self._board(tags, metrics["iteration"], consumed_samples)

    def evaluation(
        self, iteration: int, loss: float, consumed_samples: int, split: str = "validation"
    ) -> None:
        """Record one evaluation."""
        self.trackers.log({f"{split}_loss": loss}, iteration)
        self._write({"iteration": iteration, f"{split}_loss": loss})
        self._board({f"lm loss {split}": loss}, iteration, consumed_samples)

    def parts(self, iteration: int, parts: StepParts) -> None:
        """Record the profiled parts of a step."""
        self._write({"iteration": iteration, "parts": parts.model_dump()})

    def straggler(self, iteration: int, line: str) -> None:
        """Record the line that names a slow rank."""
        self._write({"iteration": iteration, "straggler": line})

    def close(self) -> None:
        """Flush and close the files."""
        self.trackers.close()
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            with self._board_may_fail():
                self.board.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.file is not None:
            self.file.write(json.dumps({name: _finite(value) for name, value in record.items()}))

    def _board(self, tags: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        if self.board is None:
            return
        with self._board_may_fail():
            for tag, value in tags.items():
                self.board.add_scalar(tag, value, iteration)
                self.board.add_scalar(f"{tag} vs samples", value, consumed_samples)

    @contextmanager
    def _board_may_fail(self) -> Iterator[None]:
        """Stop writing event files after the first write error, such as a full disk."""
        try:
            yield
        except OSError as error:
            self.board = None
            say(
                f"warning: TensorBoard's events cannot be written ({error.strerror}); the run goes on",
                sys.stderr,
            )


def _quiet_writer(failed: threading.ExceptHookArgs) -> None:
    """Suppress the traceback of TensorBoard's thread, as the error is raised again when events are added."""
    if not (issubclass(failed.exc_type, OSError) and type(failed.thread).__name__ == "_AsyncWriterThread"):
        threading.__excepthook__(failed)


def _finite(value: Any) -> Any:
    """A number for JSON, with null for NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
