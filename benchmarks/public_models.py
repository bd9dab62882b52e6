"""Checks that public models are read with the published number of parameters, or refused with the reason.

python -m benchmarks.public_models [--json]

public_models.json has the keys of `config.json` files that sizes and operations depend on, each with the
public copy that it was read in, as REPOSITORY@COMMIT:PATH (where none was found: transformers' defaults, or a
training script of the model), and the count of the model's page: the `total` of its safetensors files as
AlexsJones/llmfit@5bdc9df9d8:llmfit-core/data/hf_models.json has it, or of a sibling of the same shapes
(`of`), or a rounded one (`to`, with its `source`). What files hold beside a language model (`beside`) is
counted apart. The installed transformers builds every model that is read on the meta device. Exit code 1 if a
model is read with a count other than both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from planner.inputs.huggingface.config_file import model_from_hf_config
from planner.inputs.huggingface.readers import DEFAULTS_OF

MODELS = Path(__file__).with_name("public_models.json")

SAME = 0.001
"""Largest relative difference of two counts that count as equal."""


def _further_layers(model: ModelSpec) -> int:
    joined = 2 * model.hidden**2 + 3 * model.norm_parameters
    return joined + model.layer_parameters(model.layer_kind(model.layers - 1))


def _published_moe_layers(model: ModelSpec) -> int:
    return model.moe_layers + model.mtp_layers


BESIDE: dict[str, Callable[[ModelSpec], int]] = {
    "copy of the embeddings": lambda model: model.vocab * model.hidden,
    "masks": lambda model: model.layers * model.max_positions**2,
    "frequencies": lambda model: model.layers * model.head_dim // 2,
    "layer of further tokens": _further_layers,
    "its embeddings and head": lambda model: 2 * model.vocab * model.hidden,
    "biases of experts": lambda model: _published_moe_layers(model) * model.experts,
    "scales of blocks": lambda model: model.parameters // 128**2,
    "scales of groups": lambda model: (
        3 * _published_moe_layers(model) * model.experts * model.hidden * model.expert_ffn // 32
    ),
    "experts in pairs": lambda model: (
        -3 * _published_moe_layers(model) * model.experts * model.hidden * model.expert_ffn // 2
    ),
}
"""Parameters that files hold beside the weights of a language model.

These are tied embeddings once more, buffers (causal masks, rotary frequencies, biases that follow loads), MTP
layers, and scales of blocks of 128 x 128 (fp8) or of groups of 32 (int4, MXFP4). `vision` is counted by
transformers. Where two elements of four bits are stored as one of eight, half of the experts is missing
(`experts in pairs`).
"""


@dataclass(frozen=True)
class Row:
    """One model."""

    name: str
    source: str
    model_type: str
    published: int | None
    """Parameters by the model's page, without those of `BESIDE`."""
    tolerance: float
    """Allowed relative difference, from the digits of `published`."""
    built: int | None
    """Parameters by transformers; None if it does not know the type."""
    read: int | None
    refusal: str
    """The reason why the model is not read."""

    def error(self, count: int | None) -> float | None:
        """The relative error of the parameters that are read; None if they or `count` are missing."""
        return None if self.read is None or count is None else self.read / count - 1

    @property
    def is_right(self) -> bool:
        """True if the model is refused, or read with both counts."""
        errors = self.error(self.published), self.error(self.built)
        return all(
            error is None or abs(error) <= limit
            for error, limit in zip(errors, (self.tolerance, SAME), strict=True)
        )


def models() -> list[dict[str, Any]]:
    """The entries of the list, in order."""
    found: list[dict[str, Any]] = json.loads(MODELS.read_text(encoding="utf-8"))
    return found


def read(config: dict[str, Any], folder: Path) -> ModelSpec | str:
    """The model of a config.json in `folder`, as the planner reads it, or the reason why it is refused."""
    file = folder / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    try:
        return model_from_hf_config(file)
    except InputError as refused:
        return str(refused).removeprefix(f"model config {str(file)!r}: ")


def built(config: dict[str, Any]) -> tuple[int, int] | None:
    """Parameters of the language model and of parts beside it, by transformers on the meta device."""
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = dict(config)
    name = str(config.pop("model_type"))
    name = DEFAULTS_OF.get(name, name)
    if name not in CONFIG_MAPPING:
        return None
    settings: Any = CONFIG_MAPPING[name].from_dict(config)
    both: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    text: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    with torch.device("meta"):
        whole = (both if type(settings) in both else text)[type(settings)](settings)
    total = sum(weight.numel() for weight in whole.parameters())
    if type(settings) not in both:
        return total, 0
    language = getattr(whole, "model", whole).language_model
    head = whole.get_output_embeddings().weight
    counted = sum(weight.numel() for weight in language.parameters())
    counted += 0 if any(weight is head for weight in language.parameters()) else head.numel()
    return counted, total - counted


def row(entry: dict[str, Any], folder: Path) -> Row:
    """One model, read by way of a file in `folder`."""
    config, published = entry["config"], entry.get("published", {})
    name, source, kind = entry["name"], entry["source"], str(config["model_type"])
    model = read(config, folder)
    if isinstance(model, str):
        return Row(name, source, kind, None, SAME, None, None, model)
    count, counts = None, built(config)
    if published:
        beside = sum(BESIDE[part](model) for part in published.get("beside", ()) if part != "vision")
        count = published["parameters"] - beside - published.get("vision", 0)
    tolerance = max(SAME, published.get("to", 0) / 2 / count) if count else SAME
    return Row(name, source, kind, count, tolerance, counts and counts[0], model.parameters, "")


def rows() -> list[Row]:
    """All models."""
    with TemporaryDirectory() as folder:
        return [row(entry, Path(folder)) for entry in models()]


def _cells(one: Row) -> str:
    def number(count: int | None) -> str:
        return "-" if count is None else f"{count:,}"

    def percent(error: float | None) -> str:
        return "-" if error is None else f"{error:+.4%}"

    name = f"{one.name:<46}{one.model_type:<14}"
    if one.read is None:
        return f"{name} refused: {one.refusal.split(' is not one of ')[0]}"
    return (
        f"{name}{number(one.published):>18}{number(one.built):>18}{number(one.read):>18}"
        f"{percent(one.error(one.published)):>10}{percent(one.error(one.built)):>10}"
    )


def main() -> int:
    """Print a line for each model; returns 1 if a count differs from the published or built one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = rows()
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
        return int(not all(one.is_right for one in found))
    print(f"{'model':<46}{'type':<14}{'published':>18}{'transformers':>18}{'read':>18}{'off':>10}{'off':>10}")
    for one in found:
        print(_cells(one))
    print("\nread in")
    for one in found:
        print(f"{one.name:<46}{one.source}")
    taken = [one for one in found if one.read is not None]
    told = [one for one in taken if one.published is not None]
    right = sum(one.is_right for one in taken)
    print(
        f"\n{len(found)} models: {right} of {len(taken)} read within 0.1 %, {len(told)} of them as "
        f"published, {len(found) - len(taken)} refused"
    )
    return int(right < len(taken))


if __name__ == "__main__":
    sys.exit(main())
