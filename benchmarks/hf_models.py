"""Compares the parameters that the readers of config.json count with those of models built by transformers,
for the defaults of every type.

python -m benchmarks.hf_models [--write] [--json]

Each model type that is read is built on the meta device from the default configuration of the installed
transformers, and read here from that configuration's keys. `--write` records the defaults of the
configuration classes in planner/inputs/huggingface/defaults.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from costmodels.catalogue.yaml_files import build
from costmodels.spec.model import ModelSpec
from planner.inputs.huggingface.readers import DEFAULTS_OF, READERS, model_fields

DEFAULTS = Path(__file__).parents[1] / "planner" / "inputs" / "huggingface" / "defaults.json"

NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}}
"""Keys without a default."""

OF_NO_MODEL = frozenset(
    (
        *("return_dict", "output_hidden_states", "output_attentions", "dtype", "torch_dtype", "model_type"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "architectures", "id2label", "label2id"),
        *("problem_type", "_name_or_path", "transformers_version", "bos_token_id", "eos_token_id"),
        *("pad_token_id", "use_cache", "initializer_range", "attention_dropout", "torchscript"),
        *("tokenizer_class", "is_decoder", "cross_attention_hidden_size", "add_cross_attention"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "resid_pdrop", "embd_pdrop"),
        *("attn_pdrop", "pretraining_tp"),
    )
)
"""Keys that affect no size and no operation."""


@dataclass(frozen=True)
class Row:
    """One model type: parameters of its default configuration."""

    model_type: str
    transformers: int | None
    """Parameters of the model by transformers; None if it has no pure causal language model of this type."""
    read: int

    @property
    def error(self) -> float | None:
        """The relative error of the parameters that are read."""
        return None if self.transformers is None else self.read / self.transformers - 1


def class_defaults(model_type: str) -> dict[str, Any]:
    """`defaults` and `names` of a model type as `defaults.json` has them.

    Lists are left out, and so are keys that follow from other keys.
    """
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    values = config_class().to_dict()
    following: set[str] = set()
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 2 or key in OF_NO_MODEL:
            continue
        try:
            other = config_class(**{key: 2 * value}).to_dict()
        except Exception:
            # A configuration that its class refuses tells nothing.
            continue
        following |= {name for name in values if name != key and other.get(name) != values[name]}
    kept = {
        key: value
        for key, value in values.items()
        if key not in OF_NO_MODEL | following and not isinstance(value, list)
    }
    return {"defaults": kept, "names": dict(config_class.attribute_map)}


def write() -> None:
    """Record the defaults of the installed transformers."""
    import transformers

    types = [name for name in sorted(READERS) if name not in DEFAULTS_OF]
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(class_defaults(name), sort_keys=True)}" for name in types
    )
    source = f"configuration classes of transformers {transformers.__version__}"
    DEFAULTS.write_text(f'{{"source": {json.dumps(source)},\n "types": {{\n{lines}\n}}}}\n')


def compare(model_type: str, **changes: Any) -> Row:
    """Parameters of the default configuration of a type with `changes`, built and read."""
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    changes = NEEDED.get(model_type, {}) | changes
    builder: Any = AutoModelForCausalLM
    config: Any = CONFIG_MAPPING[DEFAULTS_OF.get(model_type, model_type)](**changes)
    built = None
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        with torch.device("meta"):
            model = builder.from_config(config)
        built = sum(weight.numel() for weight in model.parameters())
    fields = model_fields({"model_type": model_type} | changes)
    spec = build(ModelSpec, fields | {"name": model_type, "seq": 64}, model_type)
    return Row(model_type, built, spec.parameters)


def main() -> int:
    """Print a line for each model type; returns 1 if one differs by more than 0.1 %."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="record the defaults of transformers first")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.write:
        write()
    rows = [compare(model_type) for model_type in READERS]
    if options.json:
        print(json.dumps([asdict(row) | {"error": row.error} for row in rows]))
    else:
        for row in rows:
            off = "not built alone" if row.error is None else f"{row.error:+.4%}"
            print(f"{row.model_type:20} {row.transformers or 0:>18,} {row.read:>18,}  {off}")
    return int(any(row.error is not None and abs(row.error) > 0.001 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
