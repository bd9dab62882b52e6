"""Models whose experts are stored in four bits are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from costmodels.errors import InputError
from runtime.huggingface.model_folder import HuggingFaceModel
from tests.support.hugging_face import hugging_face, skip_unless_there

EXPERTS, WIDTH, HIDDEN = 6, 48, 32


def write_packed(folder: Path) -> dict[str, torch.Tensor]:
    """A gpt-oss of `tests.support` whose experts' inputs are packed in every layer; the packed tensors."""
    theirs, _ = hugging_face("gpt_oss", folder)
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    packed: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if name.endswith("gate_up_proj")]:
        del tensors[name]
        blocks = torch.randint(0, 256, (EXPERTS, 2 * WIDTH, HIDDEN // 32, 16), generator=generator)
        scales = torch.randint(115, 130, (EXPERTS, 2 * WIDTH, HIDDEN // 32), generator=generator)
        packed |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
    save_file(tensors | packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return packed


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    skip_unless_there("gpt_oss")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    packed = write_packed(tmp_path)
    model = HuggingFaceModel(tmp_path)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        expected = mxfp4.convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"])
        # [E, D, 2 F] with gate and input in turns, and ours [E, F, D].
        gate, up = expected[..., ::2].mT, expected[..., 1::2].mT
        assert torch.equal(model.read_ours(f"layers.{layer}.mlp.experts.gate"), gate)
        assert torch.equal(model.read_ours(f"layers.{layer}.mlp.experts.up"), up)
        assert gate.dtype == torch.bfloat16


def test_packed_weights_without_their_factors_are_refused(tmp_path: Path) -> None:
    skip_unless_there("gpt_oss")
    packed = write_packed(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in packed if name.endswith("_scales"))
    tensors[name] = tensors[name][:, :1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"gate_up_proj is quantised; give the model in bf16"):
        HuggingFaceModel(tmp_path)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="missing, which a gpt_oss"):
        HuggingFaceModel(tmp_path)
