"""The flags of multi-token prediction, in Megatron-LM's spelling."""

from __future__ import annotations

from typing import ClassVar

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import MultiTokenPrediction
from planner.inputs.model import with_mtp
from planner.options.flags import flag
from planner.options.limits import AT_LEAST_1, POSITIVE


@dataclass(frozen=True)
class MtpFlags:
    """Multi-token prediction (MTP): modules after the model, as in DeepSeek-V3."""

    SECTIONS: ClassVar[dict[str, str]] = {"mtp_num_layers": "Multi-token prediction"}

    mtp_num_layers: int | None = flag(
        None,
        "Train this many MTP modules, each for one further token; none of a model's unless given.",
        within=AT_LEAST_1,
    )
    mtp_loss_scaling_factor: float | None = flag(
        None, "Factor of the mean loss of MTP modules; 0.1 unless given.", within=POSITIVE
    )

    def with_mtp(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with the modules that the flags ask for; raises `InputError` where they contradict it."""
        if self.mtp_num_layers is None:
            if self.mtp_loss_scaling_factor is not None:
                raise InputError(
                    f"--mtp-loss-scaling-factor {self.mtp_loss_scaling_factor:g} needs --mtp-num-layers, the "
                    "number of MTP modules"
                )
            return spec
        given = {} if self.mtp_loss_scaling_factor is None else {"loss_factor": self.mtp_loss_scaling_factor}
        return with_mtp(spec, MultiTokenPrediction(depths=self.mtp_num_layers, **given))


def mtp_note(spec: ModelSpec) -> str:
    """A note on the parameters of MTP modules, which train besides the model."""
    assert spec.mtp is not None
    modules = "MTP module" if spec.mtp.depths == 1 else "MTP modules"
    return (
        f"{spec.mtp.depths} {modules}: {spec.mtp_parameters / 1e6:,.1f} M parameters besides "
        f"the {spec.parameters / 1e6:,.1f} M, their mean loss times {spec.mtp.loss_factor:g}"
    )
