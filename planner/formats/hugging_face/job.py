"""A job of Hugging Face's trainer: its command, accelerate's YAML and DeepSpeed's JSON, each as keys."""

from __future__ import annotations

from costmodels.dataclass import dataclass
from planner.formats.facts.keyed import Keyed
from planner.formats.facts.launcher import Launch


@dataclass
class Job:
    """A job's files, each as keys; empty where there is none."""

    command: Keyed
    accelerate: Keyed
    deepspeed: Keyed
    launch: Launch | None
    software: str = "transformers"
    """The software whose script or configuration it is, where that is known."""
    alone: bool = False
    """No command and no configuration of a trainer is given, whose defaults would count."""

    @property
    def all(self) -> tuple[Keyed, ...]:
        """The files of the job."""
        return self.command, self.accelerate, self.deepspeed

    @property
    def distributed(self) -> str:
        """The kind of distribution that accelerate names: `fsdp`, `deepspeed` and the like; empty for
        none."""
        return (self.accelerate.text("distributed_type") or "").lower()

    @property
    def uses_deepspeed(self) -> bool:
        """True if a flag or accelerate asks for DeepSpeed."""
        return self.distributed == "deepspeed" or "--deepspeed" in self.command

    @property
    def is_under_fsdp(self) -> bool:
        """True if a flag or accelerate asks for FSDP."""
        asked = self.distributed == "fsdp" or "--fsdp" in self.command
        return asked or self.accelerate.under("fsdp_config")


def software_of(launch: Launch | None) -> str:
    """The software of a command, by the name of its program."""
    words = [] if launch is None else [*(word.text for word in launch.launcher), launch.program]
    names = {word.rpartition("/")[2] for word in words}
    if "swift" in names or any("swift/cli/" in word for word in words):
        return "ms-swift"
    if names & {"llamafactory-cli", "llamafactory"}:
        return "llama-factory"
    return "trl" if "trl" in names else "transformers"
