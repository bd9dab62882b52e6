"""Training of a plan: `torchrun -m runtime.pretrain`, with `--plan plan.json` or with a plan found by the
ranks."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    gc.disable()  # To look through all that is imported for garbage takes a fifth of the time.

import torch
import torch.distributed as dist
import typer

import planner.options.flags
from costmodels import ModelSpec
from costmodels.errors import InputError
from costmodels.spec.hardware import NARROW
from planner.formats.pasted import PastedCommand
from planner.inputs.device import is_cpu
from planner.inputs.node_kinds import is_of_kinds
from planner.options.command import add
from planner.options.flags import flag_groups, groups_of
from planner.options.limits import check_bounds
from planner.options.parallel import check_alone
from planner.plan import Plan
from runtime import entry
from runtime.checkpoint.owner import PATIENCE_OF_RESTART_S, PATIENCE_S, Owner
from runtime.data import Datasets
from runtime.faults.error_file import report
from runtime.faults.exit_signals import ignore_early
from runtime.faults.heartbeat import activity, set_operation
from runtime.faults.watchdog import Watchdog
from runtime.job.attention_choice import AUTO, use_attention
from runtime.job.continuation import (
    PreviousRun,
    change_line,
    plan_for_ranks,
    previous_run,
)
from runtime.job.datasets import ModelTokenizer, model_tokenizer, open_datasets
from runtime.job.devices import check_kind, detect_device, local_device_count, torch_device
from runtime.job.job import Job, sample_order
from runtime.job.job_folders import begins_anew, check_save, iteration_of
from runtime.job.loop import Loop
from runtime.job.plan_check import check_plan_of_job
from runtime.job.plan_search import search_for_job
from runtime.job.resumption import from_saved, has_saved
from runtime.logs.console import flush, progress, say
from runtime.logs.rank_log import RankLog
from runtime.optimizers.adam8bit import check_adam8bit
from runtime.parallel.float8 import check_float8
from runtime.parallel.ranks import (
    Ranks,
    end_with_agent,
    is_alone,
    is_lost_connection,
    leave_process_group,
    run_in_turns,
    run_on_first_rank,
    run_together,
    start_process_group,
)
from runtime.preflight.run import preflight
from runtime.processes.start_variables import is_elastic, is_restarted
from runtime.settings.checks import check_folder
from runtime.settings.idle_flags import idle_flag_notes
from runtime.train.trainer import Trainer
from runtime.world.membership import RANK_VARIABLES, rank_variables


def given_plan(job: Job, ranks: Ranks) -> Plan | None:
    """The plan of the file in the flags, for ranks that need it: the first one, and ranks on machines with
    GPUs.

    Rank 0 sends the plan to the others. Ranks on machines with GPUs need it to know if the plan uses these.
    """
    if job.run.plan is None or (ranks.rank > 0 and not local_device_count()):
        return None
    return Plan.load(job.run.plan)


def plan_of_job(job: Job, ranks: Ranks, given: Plan | None, previous: PreviousRun | None = None) -> Plan:
    """The `given` plan, or the best one for the present ranks.

    A job that continues, from `previous` or after a failure, keeps its global batch. It is planned anew if
    the given plan has another number of ranks.
    """
    for name in ("world_size", "local_world_size"):
        asked, started = getattr(job.cluster, name), getattr(ranks, name)
        if asked in (None, started):
            continue
        flag_text = f"--{name.replace('_', '-')} {asked}"
        raise InputError(f"{flag_text}: torchrun started {started} ranks; leave the flag out")
    if given is not None:
        joined = dataclasses.replace(job.cluster, world_size=None, local_world_size=None, device=None)
        check_alone(job.model, job.batch, job.parallel, joined)
        goes_on = previous is not None or is_restarted() or is_elastic()
        if given.layout.world_size == ranks.world_size or not goes_on:
            return given
        return plan_for_ranks(given, ranks.world_size, ranks.local_world_size, job.training, job.data)
    device = job.cluster.device or detect_device(ranks.local_world_size)
    return search_for_job(job, device, ranks.world_size, ranks.local_world_size, previous).plan(0)


def check_job(plan: Plan, job: Job, world_size: int) -> None:
    """Raise `InputError` for flags that would fail later."""
    job.training.check()
    job.output.check()
    check_save(job.output)
    check_plan_of_job(plan, job, world_size)
    for name in ("save", "log_dir", "tensorboard_dir"):
        folder = getattr(job.output, name)
        if folder is not None:
            check_folder(folder, f"--{name.replace('_', '-')}")


def train(job: Job) -> int:
    """Run the job on this rank; returns its exit code."""
    ignore_early()
    end_with_agent()
    os.environ |= rank_variables(os.environ)
    ranks = Ranks.from_environment()
    asks_for_cpu = is_cpu(job.cluster.device)
    if job.cluster.device is not None and not asks_for_cpu and not local_device_count():
        raise InputError(f"--device {job.cluster.device}: this machine has no GPUs; leave it out or give cpu")
    given = given_plan(job, ranks)
    on_cpu = asks_for_cpu or (given is not None and given.cluster.device.kind == "cpu")
    device = torch_device(on_cpu or not local_device_count(), ranks)
    check_bounds(job.run)
    if job.output.log_dir is not None:
        RankLog(job.output.log_dir, ranks.rank).open()
    start_process_group(ranks, device, job.run.distributed_timeout_minutes)
    code = 0
    with _watchdog(job, ranks) as watchdog:
        try:
            code = _run(job, ranks, device, given)
        except InputError as error:
            if ranks.world_size == 1:
                dist.destroy_process_group()
                raise
            # One line, and all ranks end, whether all of them refuse or this one alone.
            watchdog.fail(planner.options.flags.one_line(error), error.exit_code)
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            _lost_connection(watchdog)
        set_operation("waiting for the others to end")
        leave_process_group(device)
    return code


def _watchdog(job: Job, ranks: Ranks) -> Watchdog:
    return Watchdog(
        dist.distributed_c10d._get_default_store(),
        ranks.rank,
        ranks.world_size,
        job.faults.hang_timeout(job.run.distributed_timeout_minutes),
        samples=job.faults.straggler_factor > 0,
    )


def _lost_connection(watchdog: Watchdog) -> NoReturn:
    """Report once for all ranks that another rank was lost, unless that rank has reported the reason."""
    what = activity().describe()
    # torchrun blames the first rank that it sees ended: let that be the one that was lost.
    time.sleep(1.0)
    if not watchdog.is_over() and watchdog.first_to("losses"):
        text = f"rank {watchdog.rank} lost the connection to another rank in {what}"
        say(f"runtime.pretrain: {text}", sys.stderr)
    raise typer.Exit(1)


def _run(job: Job, ranks: Ranks, device: torch.device, given: Plan | None) -> int:
    _begin("planning")
    if run_on_first_rank(lambda: (is_restarted() or is_elastic()) and has_saved(job)):
        job = from_saved(job)
    job = _looked_at(job, ranks, device, given)
    plan = Plan.model_validate_json(run_on_first_rank(lambda: _prepare(job, ranks, given)))
    with _saving_alone(job.output.save):
        return _train(job, plan, ranks, device)


@contextlib.contextmanager
def _saving_alone(folder: str | None) -> Iterator[None]:
    """Lock the folder of --save against other jobs; the first rank does it for all."""
    if folder is None:
        yield
        return
    set_operation("waiting for another job that saves into the folder of --save")
    owner = Owner(Path(folder), f"--save {folder}")
    patience_s = PATIENCE_OF_RESTART_S if is_restarted() else PATIENCE_S
    run_on_first_rank(lambda: owner.acquire(patience_s))
    try:
        yield
    finally:
        owner.release()


def _train(job: Job, plan: Plan, ranks: Ranks, device: torch.device) -> int:
    spec, layout = plan.model, plan.layout
    if plan.cluster.parts:
        run_together(lambda: check_kind(plan, ranks))
    if layout.precision in NARROW:
        run_together(lambda: check_float8(device, layout.precision))
    if layout.optimizer == "adam8bit":
        run_together(check_adam8bit)
    _begin("opening the data")
    own = run_together(lambda: model_tokenizer(job.output.load, job.model.model))
    datasets = run_in_turns(ranks, lambda: _datasets(job, plan, own))
    line = _attention_line(job, plan, datasets, device)
    if line and ranks.rank == 0:
        say(line)
    _begin("building the model")
    trainer = Trainer(spec, layout, job.training, device, job.faults)
    consumed = 0
    if job.output.load is not None:
        consumed = _load(job, job.output.load, trainer, spec, datasets)
    if job.output.save is not None:
        from runtime.job.initial_state import keep_companions

        run_on_first_rank(
            lambda: keep_companions(job.output, job.data, spec, own and own.tokenizer, datasets.record)
        )
    if ranks.rank == 0:
        _announce(plan, trainer.iteration, job)
    try:
        return Loop(job, plan, trainer, datasets, consumed).run()
    finally:
        trainer.close()


def _attention_line(job: Job, plan: Plan, datasets: Datasets, device: torch.device) -> str:
    """Choose the kernel of attention for all ranks; returns a line for the user, or an empty text."""
    asked, boundaries = job.training.attention_kernel, datasets.boundaries
    if plan.cluster.parts and asked == AUTO:
        # The fastest kernel of the first rank's device may not run on the others.
        return ""
    set_operation("choosing the kernel of attention")
    has_masks = boundaries is not None and boundaries.reset_attention_mask
    return use_attention(asked, plan.model, plan.layout, device, has_masks)


def _begin(what: str) -> None:
    """Set this rank's current operation; the first rank also prints it."""
    set_operation(what)
    if dist.get_rank() == 0:
        progress(what)


def _load(job: Job, folder: str, trainer: Trainer, spec: ModelSpec, datasets: Datasets) -> int:
    """Load the checkpoint that the flags name, if there is one; returns its number of consumed samples."""
    # The readers of tensors take a second to import, which runs from scratch need not wait for.
    from runtime import checkpoint
    from runtime.job import initial_state

    _begin("loading a checkpoint")
    iteration = run_on_first_rank(lambda: iteration_of(job.output))
    if iteration is None:
        return 0
    if run_on_first_rank(lambda: begins_anew(job.output, iteration)):
        initial_state.load_weights(folder, trainer, spec, iteration)
        return 0
    order = {} if job.data.allow_data_change else run_together(lambda: sample_order(job, datasets))
    told = checkpoint.load(folder, trainer, spec, iteration, order, not job.output.no_load_optim)
    if trainer.guard is not None and "step_guard" in told:
        trainer.guard.load(told["step_guard"])
    consumed: int = told["consumed_samples"]
    return consumed


def _looked_at(job: Job, ranks: Ranks, device: torch.device, given: Plan | None) -> Job:
    """The job after the check of its ranks, with measured links if it plans with them."""
    run_together(lambda: job.preflight.check(job.run.plan))
    set_operation("looking at all ranks")
    table = preflight(job.preflight, ranks, device, job.arguments(), job.output.log_dir, _kinds(job, given))
    if not job.preflight.replan or table is None:
        return job
    return dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, network_table=table))


def _kinds(job: Job, given: Plan | None) -> int:
    """Kinds of devices of a job's plan, for rank 0."""
    if given is not None:
        return max(1, len(given.cluster.parts))
    return 2 if job.cluster.device is not None and is_of_kinds(job.cluster.device) else 1


def _prepare(job: Job, ranks: Ranks, given: Plan | None) -> str:
    previous = previous_run(job.output)
    plan = plan_of_job(job, ranks, given, previous)
    check_job(plan, job, ranks.world_size)
    if job.run.plan is None and job.output.log_dir is not None:
        plan.save(Path(job.output.log_dir) / "plan.json")
    change = "" if previous is None else change_line(previous, plan.layout, ranks.world_size)
    if change:
        say(change)
    return plan.model_dump_json()


def _datasets(job: Job, plan: Plan, own: ModelTokenizer | None) -> Datasets:
    batch = plan.layout.global_batch_size
    return open_datasets(
        job.data,
        plan.model,
        job.training.seed,
        job.training.batches(plan.layout).total(job.training.train_iters),
        job.output.eval_iters * batch,
        own,
    )


def _announce(plan: Plan, iteration: int, job: Job) -> None:
    say(
        f"training {plan.model.name} ({plan.model.parameters / 1e6:.1f} M parameters) on "
        f"{plan.layout.world_size} x {plan.cluster.device.name} as {plan.layout.describe()}"
    )
    flags = job.training, job.data, job.output, job.faults
    for line in idle_flag_notes(*flags, spec=plan.model, layout=plan.layout):
        say(f"note: {line}")
    folder, last = job.output.load, job.training.train_iters
    if iteration >= last:
        say(f"nothing to do: {folder} is at iteration {iteration} of --train-iters {last}")
    elif iteration:
        say(f"resumed from {folder} at iteration {iteration}")
    elif folder is not None:
        from runtime.checkpoint import iteration_to_load

        loaded = iteration_to_load(folder, job.output.ckpt_step)
        what = f"no checkpoint in {folder}" if loaded is None else f"loaded the weights of {folder}"
        say(f"{what}: starting at iteration 0")


def is_question(job: Job) -> bool:
    """True if the flags ask for a plan of several ranks, and no launcher started this process as one of
    them."""
    ranks = job.cluster.world_size
    if ranks is None or ranks < 2 or job.run.plan is not None or not is_alone():
        return False
    return not rank_variables(os.environ)


def suggest() -> NoReturn:
    """Run `planner suggest` with the same flags instead, as it accepts those of a training command too."""
    say(
        "runtime.pretrain: not started by torchrun, so nothing is trained; the plan for these flags:",
        sys.stderr,
    )
    flush()
    command = entry.command("planner", "suggest", *sys.argv[1:])
    os.execv(command[0], command)


app = typer.Typer(add_completion=False)


@flag_groups(**groups_of(Job))
def pretrain(**groups: Any) -> None:
    """Train a GPT-like model on the ranks that torchrun started."""
    job = Job(**groups)
    if is_question(job):
        suggest()
    try:
        code = train(job)
    except InputError as error:
        if _is_first():
            report(planner.options.flags.one_line(error), error.exit_code)
        raise
    if code:
        _leave(code)


add(app, pretrain, kind=PastedCommand)


def _leave(code: int = 0) -> NoReturn:
    """End the process at once, after all its work is done.

    Threads of the communication library can outlive the finalisation of the interpreter, and then abort a
    job that has done all its work.
    """
    atexit._run_exitfuncs()
    flush()
    os._exit(code)


def _is_first() -> bool:
    """Return whether this rank prints for all; input errors occur on every rank, but are printed once."""
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0") == "0"


def main() -> NoReturn:
    """Run the command line as the rank in the environment variables, and end this process."""
    gc.freeze()
    gc.enable()
    try:
        planner.options.flags.run(app, "runtime.pretrain", quiet=not _is_first())
    except SystemExit as stop:
        if stop.code:
            raise
    _leave()


if __name__ == "__main__":
    main()
