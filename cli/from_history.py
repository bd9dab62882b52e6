"""`planner calibrate --from-history`: constants of this machine from measurements of its jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cli.status import Status
from cli.tables import table, table_text
from costmodels.catalogue.measured_devices import own_file
from costmodels.errors import InputError
from costmodels.paths import expanded
from costmodels.pytorch import full_version
from planner.history.file import history_file, past_runs
from planner.history.refit import Refit, median_error, refits
from runtime.calibrate.result import keep
from runtime.logs.console import say


def calibrate_from_history(save: str | None, as_json: bool) -> None:
    """Refit this machine's devices from its history; raises `InputError` where there is too little.

    Args:
        save: the file to write; this machine's own file if None.
    """
    runs, wrong = past_runs()
    torch = full_version()
    if not torch:
        raise InputError("--from-history: runs are of a PyTorch, and none is installed")
    with Status() as status:
        status.tell(f"fitting {len(runs)} runs")
        found = refits(runs, torch)
    for refit in found:
        if refit.is_better:
            path = expanded(save) if save else own_file(refit.device.name)
            keep(path, refit.ranks, refit.device, [step.model for step in refit.steps])
    if as_json:
        figures = [refit.as_json() for refit in found]
        print(
            json.dumps({"history": str(history_file()), "lines_left_out": wrong, "ranks": figures}, indent=2)
        )
        return
    if wrong:
        say(f"{wrong} lines of {history_file()} are none of this planner, and were left out")
    rows = [
        [
            *(str(refit.ranks), str(refit.runs), str(len(refit.steps))),
            *(f"{100 * median_error(each):.1f} %" for each in (refit.before, refit.left_out, refit.after)),
        ]
        for refit in found
    ]
    columns = ("ranks", "runs", "layouts", "error before", "of those left out", "of those fitted")
    say(table_text(table(columns, rows)))
    for line in _outcome(found, save):
        say(line)


def _outcome(found: list[Refit], save: str | None) -> Iterator[str]:
    for refit in found:
        before, left_out = (100 * median_error(each) for each in (refit.before, refit.left_out))
        if refit.is_better:
            path = save or own_file(refit.device.name)
            yield f"{refit.ranks} ranks: wrote {path}; layouts that were left out are {left_out:.1f} % off"
        else:
            yield (
                f"{refit.ranks} ranks: nothing is changed, as layouts that were left out would be "
                f"{left_out:.1f} % off, where they are {before:.1f} % off now"
            )
