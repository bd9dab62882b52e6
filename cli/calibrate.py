"""`planner calibrate`: measure this machine, so that plans for it use measured rates."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import ClassVar

from cli.from_history import calibrate_from_history
from cli.status import Status
from costmodels.catalogue.local_machine import available_cores
from costmodels.catalogue.measured_devices import folder, own_file
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.paths import entries, exists
from planner.options.flags import flag, flag_groups
from runtime.calibrate.calibrate_options import CalibrateOptions
from runtime.dryrun.requirements import check_torch
from runtime.launch.local_plans import MOST_CPU_RANKS
from runtime.settings.checks import check_host

WIDTH = 20
"""Characters of the bar."""


@dataclass(frozen=True)
class RanksOptions:
    """The ranks that measure."""

    SECTIONS: ClassVar[dict[str, str]] = {"world_size": "Calibration"}

    world_size: str | None = flag(
        None,
        "Numbers of ranks to measure with, such as 2,4; unless given, all GPUs, or one and two ranks for "
        "each core of a CPU.",
        metavar="RANKS",
    )
    forget: bool = flag(False, "Remove the measurements of this machine, and plan by the catalogue again.")
    from_history: bool = flag(
        False, "Measure nothing: fit the constants again to measurements of jobs on this machine."
    )
    json: bool = flag(False, "With --from-history: print one JSON object.")

    def counts(self, on_cpu: bool, devices: int) -> list[int]:
        """Numbers of ranks to measure with; raises `InputError` for more devices than this machine has."""
        if self.world_size is None:
            cores = min(MOST_CPU_RANKS, available_cores())
            return [cores, 2 * cores] if on_cpu else [devices]
        try:
            found = [int(word) for word in self.world_size.split(",")]
        except ValueError:
            raise InputError(
                f"--world-size {self.world_size}: expected numbers of ranks, such as 2 or 2,4"
            ) from None
        for count in found:
            if count < 1:
                raise InputError(f"--world-size {count}: must be at least 1")
            if on_cpu:
                check_host(count, f"--world-size {count}")
            elif count > devices:
                raise InputError(f"--world-size {count}: this machine has {devices} GPUs; give at most that")
        return found


@flag_groups(options=CalibrateOptions, ranks=RanksOptions)
def calibrate(options: CalibrateOptions, ranks: RanksOptions) -> None:
    """Measure this machine in a minute or two; suggest and launch then plan with the measured rates.

    The command times kernels of a model's shapes, memory, launches, collectives and a few whole steps. For
    good figures the machine should do nothing else. Other machines' files are given as --device FILE.json.
    """
    if ranks.json and not ranks.from_history:
        raise InputError("--json is about --from-history; give both, or leave it out")
    if ranks.forget:
        _forget()
        return
    if ranks.from_history:
        if options.save is not None and not options.save.lower().endswith(".json"):
            raise InputError(f"--save {options.save}: a device file ends in .json")
        calibrate_from_history(options.save, ranks.json)
        return
    check_torch("planner calibrate trains for a few steps", "fp32")
    from runtime.job.devices import local_device_count

    devices = 0 if options.cpu else local_device_count()
    options.specs("gpu" if devices else "cpu")
    counts = ranks.counts(not devices, devices)
    for count in counts:
        _measure(options, count, options.seconds / len(counts), not devices)


def _forget() -> None:
    pattern = own_file("*").name.replace("_", "*")
    there = entries(folder()) if exists(folder()) else []
    files = [file for file in there if fnmatchcase(file.name, pattern)]
    for file in files:
        try:
            file.unlink()
        except OSError as error:
            raise InputError(f"--forget: {file}: cannot be removed ({error.strerror})") from None
        print(f"removed {file}")
    if not files:
        print(f"nothing was measured of this machine: {folder()} has no file of it")


def _measure(options: CalibrateOptions, count: int, seconds: float, on_cpu: bool) -> None:
    """Measure with `count` ranks, and print the changed constants."""
    from runtime.calibrate.local import measure_machine
    from runtime.calibrate.result import finish, plain_device

    plain = plain_device(on_cpu, count)
    specs = options.specs("cpu" if on_cpu else "gpu")
    with Status() as status:

        def progress(share: float, what: str) -> None:
            bar = "#" * int(share * WIDTH)
            status.show(f"{count} ranks [{bar:.<{WIDTH}}] {share:.0%} {what}")

        status.tell(f"measuring with {count} ranks, {seconds:.0f} s or a little more")
        found = measure_machine(specs, plain, count, seconds, progress)
        progress(1.0, "fitting")
        lines = list(finish(found, plain, specs, options.save))
        for line in lines:
            status.line(line)
