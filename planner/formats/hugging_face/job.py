"""A job of Hugging Face's trainer: its command, accelerate's YAML and DeepSpeed's JSON, each as keys."""

from __future__ import annotations

from costmodels.dataclass import dataclass
from planner.formats.facts.keyed import Keyed
from planner.formats.facts.launcher import Launch


@dataclass
class Job:
    """A job's files, each as keys; empty for a missing file."""

    command: Keyed
    accelerate: Keyed
    deepspeed: Keyed
    launch: Launch | None
    software: str = "transformers"
    """The software of the script or configuration, if known."""
    alone: bool = False
    """True if neither a command nor a trainer's configuration is given, so no trainer's defaults apply."""

    @property
    def all(self) -> tuple[Keyed, ...]:
        """The keys of all files of the job."""
        return self.command, self.accelerate, self.deepspeed

    @property
    def distributed(self) -> str:
        """The kind of distribution that accelerate names, such as `fsdp` or `deepspeed`; empty for none."""
        return (self.accelerate.text("distributed_type") or "").lower()

    @property
    def uses_deepspeed(self) -> bool:
        """True if a flag or accelerate's file selects DeepSpeed."""
        return self.distributed == "deepspeed" or "--deepspeed" in self.command

    @property
    def is_under_fsdp(self) -> bool:
        """True if a flag or accelerate's file selects FSDP."""
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
