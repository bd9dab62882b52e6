"""`Plan`: a layout with its model, cluster, engine and estimate; saved as one JSON file that loads back
equal."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import ValidationError, model_validator

from costmodels.errors import InputError, on_one_line
from costmodels.files import MIB, read_text, write_whole
from costmodels.layers.expert_load import load_of_layout
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import Estimate
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import GIB, CountOrZero, Record, in_seconds
from planner.budget.goodput import Failures
from planner.budget.money import Money
from planner.budget.question import RunQuestion
from planner.budget.run import Run, run
from planner.objective import Objective
from planner.plan_rows import COLUMNS, html_table, shown
from planner.preference import FASTEST, Preference

if TYPE_CHECKING:
    from costmodels.timeline import Timeline

VERSION: Final = 1
"""Version of the file format; files of a later one are refused."""

DIGEST: Final = "digest"
"""Key of a file's checksum, which detects layouts that were edited by hand without a new estimate."""

LARGEST_PLAN = 64 * MIB
"""Largest bytes of a plan file; plans of thousands of stages are large."""


class Plan(Record):
    """A way to train `model` on `cluster`, which the planner ranks and the runtime executes.

    Examples:
        >>> import planner
        >>> plan = planner.suggest("llama3-8b", world_size=8, device="h100", global_batch_size=64)
        >>> plan.estimate.step_time_low_s < plan.estimate.step_time_s < plan.estimate.step_time_high_s
        True
        >>> run = plan.run("15T", price_per_hour=2.5)
        >>> round(run.money / (run.days * 24 * 8), 6)
        2.5
        >>> plan.save("plan.json")
        >>> planner.Plan.load("plan.json") == plan
        True
    """

    version: Literal[1] = VERSION
    """Version of the file format."""
    model: ModelSpec
    """The model to train."""
    cluster: Cluster
    """Devices, and the links that join them."""
    engine: Engine
    """The constants that the estimate was made with, so that the file needs no catalogue."""
    layout: Layout
    """The parallel layout of the job."""
    estimate: Estimate
    """Predicted seconds, bytes and rates of the layout."""
    fits: bool
    """The estimated peak of every device is within the cluster's memory."""
    reason: str
    """The reason for the place of this layout in the ranking, against its nearest rival."""
    objective: Objective = "throughput"
    """The objective of the ranking; `throughput` for old files without this field."""
    preference: Preference = FASTEST
    """The choice among plans within the estimate's error of each other; empty in files without it."""
    considered: CountOrZero
    """Number of all layouts in the search space, legal or not."""
    legal: CountOrZero
    """Layouts that break no rule."""
    feasible: CountOrZero
    """Legal layouts that fit into memory."""
    rejected: dict[str, CountOrZero]
    """Numbers of layouts that are not feasible, by the rule that removed them."""
    asked: RunQuestion | None = None
    """The question about the whole run: tokens, price, goal, the sizes compared; None where there was none.
    """

    @model_validator(mode="after")
    def _check(self) -> "Plan":
        if self.layout.world_size != self.cluster.world_size:
            raise ValueError(
                f"layout {self.layout.describe()} occupies {self.layout.world_size} devices, "
                f"but the cluster's world_size is {self.cluster.world_size}"
            )
        layers = sum(self.layout.layers_per_stage)
        if layers != self.model.layers:
            raise ValueError(
                f"layers_per_stage adds up to {layers} layers, but {self.model.name} has {self.model.layers}"
            )
        if len(self.estimate.memory) != self.layout.pipeline_parallel:
            raise ValueError(
                f"estimate.memory has {len(self.estimate.memory)} entries, but pipeline_parallel is "
                f"{self.layout.pipeline_parallel}"
            )
        return self

    @property
    def expert_load(self) -> float:
        """Tokens of the fullest expert-parallel rank over the mean that the estimate rests on."""
        return load_of_layout(self.model, self.engine, self.layout)

    @property
    def load_assumed(self) -> str:
        """The assumption of the estimate about the load of experts; empty where the load was given."""
        said = self.model.router.loads or self.engine.experts.load is not None
        if said or self.expert_load == 1:
            return ""
        routing = "untrained routing" if self.model.router.early else "natural routing"
        ranks, load = self.layout.expert_parallel, self.expert_load
        return f"{routing}: the fullest of {ranks} expert-parallel ranks takes in {load:.2f} x the mean"

    def __repr__(self) -> str:
        estimate, cluster = self.estimate, self.cluster
        return (
            f"<Plan of {self.model.name} on {cluster.world_size} x {cluster.device.name}: "
            f"{self.layout.describe()}; {in_seconds(estimate.step_time_s)} a step, "
            f"{estimate.peak_memory_bytes / GIB:.1f} of {cluster.memory_bytes / GIB:.1f} GiB>"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """The table that notebooks show."""
        cluster = self.cluster
        title = f"{self.model.name} on {cluster.world_size} x {cluster.device.name}: {self.reason}"
        return html_table(title, COLUMNS, [shown(self.layout, self.estimate)])

    def run(
        self,
        tokens: str | float,
        price_per_hour: str | float | Money | None = None,
        failures: Failures | None = None,
    ) -> Run:
        """Days and money to train on `tokens` (1e12, "300B"), at a price for each device and hour.

        The price is a number, or text with a currency (2.5, "$2.5", "2.5 EUR"). `failures` adds what
        checkpoints and restarts take. Raises `InputError` for wrong numbers, and where failures leave no time
        to train.
        """
        where = self.model, self.cluster, self.engine, self.layout
        return run(*where, self.estimate, tokens, price_per_hour, failures)

    def timeline(self) -> "Timeline":
        """The seconds at which each forward and backward pass and each message of one step runs, simulated.

        Raises `InputError` where the schedule does not run the plan's microbatches, or they are too many.
        """
        from costmodels.timeline import timeline  # Ranks read plans, and never price them.

        return timeline(self.model, self.cluster, self.engine, self.layout)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; a reader sees the old file or the new one, never a part.

        Raises `InputError` when the folder cannot be written.
        """
        write_whole("plan", path, self.file_text())

    def file_text(self) -> str:
        """The content of the file of the plan."""
        values = self.model_dump(mode="json")
        values[DIGEST] = _digest(values)
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan that `save` wrote.

        Raises `InputError`, in one line that names the file, when it is missing, is not JSON, is of a later
        version, holds fields that do not make a plan, or was edited so that its estimate belongs to another
        plan. Older files without a checksum are not checked.
        """
        try:
            text = read_text(path, LARGEST_PLAN)
        except FileNotFoundError:
            raise InputError(
                f"plan {path}: no such file; write one with planner suggest --save {path}"
            ) from None
        except UnicodeDecodeError:
            raise InputError(
                f"plan {path}: not a text file; expected the JSON of planner suggest --save"
            ) from None
        except OSError as error:
            raise InputError(f"plan {path}: cannot be read: {error.strerror or error}") from None
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(
                f"plan {path}: broken JSON at line {error.lineno}, column {error.colno}: {error.msg}"
            ) from None
        except ValueError:
            raise InputError(f"plan {path}: broken JSON: a number of thousands of digits") from None
        except RecursionError:
            raise InputError(f"plan {path}: its JSON is nested too deeply to be a plan") from None
        if not isinstance(values, dict):
            raise InputError(f"plan {path}: expected a JSON object, not {type(values).__name__}")
        version = values.get("version")
        if isinstance(version, int) and version > VERSION:
            raise InputError(
                f"plan {path}: version {version} is of a later planner; this one reads up to {VERSION}"
            )
        noted = values.pop(DIGEST, None)
        try:
            plan = cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"plan {path}: {on_one_line(error)}") from None
        if noted is not None and noted != _digest(values):
            raise InputError(
                f"plan {path}: the file was edited, and its estimate is of the plan before the edit; "
                "plan again with --pin for the changed degrees"
            )
        return plan


def _digest(values: Mapping[str, Any]) -> str:
    """A checksum of an estimate and of its inputs, as the file spells them."""
    parts = [values.get(name) for name in ("model", "cluster", "engine", "layout", "estimate")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def load(path: str | Path) -> Plan:
    """The plan of a file that `Plan.save` or `--save` wrote; raises `InputError` as `Plan.load` does.

    Examples:
        >>> import planner
        >>> planner.suggest("gpt2-small", world_size=4, device="h100", global_batch_size=16).save("plan.json")
        >>> planner.load("plan.json").layout.world_size
        4
    """
    return Plan.load(path)
