"""`torchrun -m runtime.calibrate`: the ranks of `planner calibrate`."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from costmodels.calibration.machine_measurements import StepTime
from costmodels.catalogue import load_engine
from planner.inputs.engine import DEFAULT_ENGINE
from runtime.calibrate.calibrate_options import CalibrateOptions
from runtime.calibrate.choice import in_turns, small_problem
from runtime.calibrate.local import KERNELS_SHARE, cut
from runtime.calibrate.measure import measure_kernels
from runtime.calibrate.result import finish, plain_device
from runtime.calibrate.steps import measure_steps
from runtime.job.devices import local_device_count, torch_device
from runtime.launch.rank_command import run_rank_command
from runtime.logs.console import say
from runtime.parallel.ranks import Ranks, leave_process_group, start_process_group

TIMEOUT_MINUTES = 10.0


def run_rank(options: CalibrateOptions) -> None:
    """Measure the devices of these ranks; the first rank fits, writes the file and prints the changes."""
    ranks = Ranks.from_environment()
    device = torch_device(options.cpu or not local_device_count(), ranks)
    plain = plain_device(options.cpu or not local_device_count(), ranks.local_world_size)
    specs = options.specs("cpu" if plain.kind == "cpu" else "gpu")
    start_process_group(ranks, device, TIMEOUT_MINUTES)
    models = [(spec, small_problem(spec, plain, ranks).table) for spec in cut(specs, plain, ranks)]
    engine = load_engine(DEFAULT_ENGINE).for_device(plain)
    started = time.perf_counter()
    found = measure_kernels(models, engine, ranks, device, KERNELS_SHARE * options.seconds)
    steps: list[StepTime] = []
    for spec, layout in in_turns(models):
        over = torch.tensor(float(time.perf_counter() - started > options.seconds), device=device)
        if ranks.world_size > 1:
            dist.broadcast(over, 0)
        if bool(over) and steps:
            break
        seconds, peak, _ = measure_steps(spec, layout, device)
        steps.append(StepTime(model=spec, layout=layout, seconds=seconds, peak_bytes=peak))
    if ranks.rank == 0:
        whole = found.model_copy(update={"steps": tuple(steps)})
        for line in finish(whole, plain, specs, options.save):
            say(line)
    leave_process_group(device)


if __name__ == "__main__":
    run_rank_command("runtime.calibrate", CalibrateOptions, run_rank)
