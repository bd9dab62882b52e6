"""The checkpoints that a run writes, one at a time, optionally beside training, with the handling of
failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from costmodels import ModelSpec
from costmodels.errors import InputError
from runtime.checkpoint.folders import iteration_folder, latest_iteration
from runtime.checkpoint.tensors import run_contents, stored_tensors
from runtime.checkpoint.writer import HostCopies, SaveFailed, StagedPlanner, write
from runtime.parallel.accelerator import device_module, is_accelerator
from runtime.parallel.cores import use_all_cores
from runtime.train.trainer import Trainer

SAVE_TIMEOUT = timedelta(hours=2)
"""Seconds after which ranks stop waiting for a rank whose disk does not answer."""

LAST_CHANCE_S = 60.0
"""Seconds that a run that ends with an error waits for a running save."""


class Saver:
    """A writer of checkpoints into one folder; every rank has one and calls it at the same iterations.

    A save that fails because of the disk keeps the earlier checkpoints and is reported. Training goes on,
    since the next save may find room. If that one fails too, or it was the last save of the run, the run
    ends, as further work might be lost. An asynchronous save copies this rank's share to host memory, and a
    thread with its own process group writes the copy. The copy's memory is reused for the next save, which
    waits until this one is written.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        asynchronous: bool = False,
        keep_last: int | None = None,
        with_optimizer: bool = True,
        report: Callable[[str], None] = print,
    ) -> None:
        self.folder = Path(folder)
        self.asynchronous, self.keep_last, self.report = asynchronous, keep_last, report
        self.with_optimizer = with_optimizer
        self.group: Any = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
        self.copies = HostCopies()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.failures: list[str] = []
        """The errors of the last saves in a row that failed."""

    def save(self, trainer: Trainer, spec: ModelSpec, run: dict[str, Any]) -> None:
        """Write the state of `trainer`, or begin to write it.

        Raises:
            InputError: the second save in a row has failed.
        """
        self.wait()
        iteration, device = trainer.iteration, trainer.grid.device
        tensors = stored_tensors(trainer, spec, self.with_optimizer)
        contents = run_contents(trainer, spec, run, self.with_optimizer)
        planner = StagedPlanner(self.copies) if self.asynchronous else None

        def work() -> None:
            try:
                if planner is not None:
                    use_all_cores()
                if is_accelerator(device):
                    device_module(device).set_device(device)
                target = write(
                    self.folder,
                    iteration,
                    tensors,
                    contents,
                    group=self.group,
                    planner=planner,
                    keep_last=self.keep_last,
                )
                self.failures.clear()
                self.report(f"saved checkpoint {target}")
            except SaveFailed as error:
                self._failed(iteration, str(error))
            except BaseException as error:
                self.error = error
            finally:
                tensors.clear()
                if planner is not None:
                    planner.taken.set()

        if planner is None:
            work()
            self._settle()
            return
        # Not a pool's thread: the end of the interpreter would wait for a rank that is gone.
        self.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self.thread.start()
        planner.taken.wait()

    def wait(self) -> None:
        """Wait until the last save is written; raises its error, as `save` does."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self._settle()

    def abandon(self) -> None:
        """Let a running save finish when the run ends with an error, unless that takes too long."""
        if self.thread is not None:
            self.thread.join(LAST_CHANCE_S)

    def close(self) -> None:
        """Wait for the last save of the run, which must have succeeded."""
        self.wait()
        if self.failures:
            raise self._end()

    def _failed(self, iteration: int, how: str) -> None:
        target = iteration_folder(self.folder, iteration)
        try:
            last = latest_iteration(self.folder)
            kept = "there is none before it" if last is None else f"the last good one is of iteration {last}"
        except InputError as error:
            kept = str(error)
        self.failures.append(f"checkpoint {target} could not be written ({how}); {kept}")
        if len(self.failures) == 1:
            self.report(f"{self.failures[0]}; the run ends if the next one fails too")

    def _settle(self) -> None:
        if self.error is not None:
            raise self.error
        if len(self.failures) > 1:
            raise self._end()

    def _end(self) -> InputError:
        return InputError(f"{self.failures[-1]}; make room and start again with --load {self.folder}")
