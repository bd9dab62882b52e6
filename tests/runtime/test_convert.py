"""Hugging Face models become checkpoints and come back the same, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from costmodels import ModelSpec, Router
from costmodels.errors import InputError
from runtime import checkpoint, convert
from runtime.checkpoint.tensor_store import FILE_BYTES
from runtime.data.tokenizers import ByteTokenizer
from runtime.generation.generator import Generator
from runtime.generation.text import Text
from runtime.huggingface.configs import config_for
from runtime.huggingface.files import file_size
from runtime.huggingface.folder_kind import COMPANIONS
from runtime.huggingface.model_folder import HuggingFaceModel
from runtime.huggingface.stored_model import StoredModel
from tests.support import stored_models as model_files
from tests.support.hugging_face import MODELS, hugging_face, skip_unless_there
from tests.support.layouts import parse_layout
from tests.support.models import FORMS
from tests.support.models import MODELS as OUR_MODELS
from tests.support.worker_pool import WorkerPool


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The folder of a small Llama, whose files a test may spoil."""
    skip_unless_there("mistral")
    model, _ = hugging_face("mistral", tmp_path / "hf")
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def tensors_in(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def config_in(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_again_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    skip_unless_there(name)
    model, spec = hugging_face(name, tmp_path / "hf")
    model.bfloat16().save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"kept": "as it is"}')
    (tmp_path / "hf" / "LICENSE").write_text("free")
    (tmp_path / "hf" / "optimizer.bin").write_text("left")
    done = convert.from_hugging_face(tmp_path / "hf", tmp_path / "ours")
    assert done.spec.parameters == sum(tensor.numel() for tensor in tensors_in(tmp_path / "hf").values()) - (
        # Biases of experts are no parameters of ours.
        spec.experts * spec.moe_layers * spec.router.expert_bias
    )
    assert checkpoint.latest_iteration(tmp_path / "ours") == 0
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "back", max_shard_size="20KB")
    assert equal(tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "back"))
    assert config_in(tmp_path / "hf") == config_in(tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"kept": "as it is"}'
    assert (tmp_path / "back" / "LICENSE").exists() and not (tmp_path / "back" / "optimizer.bin").exists()
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = {file.name for file in (tmp_path / "back").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 1
    # Several files are read as one is.
    convert.from_hugging_face(tmp_path / "back", tmp_path / "again")
    names = HuggingFaceModel(tmp_path / "hf").shapes
    first, second = StoredModel(tmp_path / "ours"), StoredModel(tmp_path / "again")
    assert all(torch.equal(first.read_ours(name), second.read_ours(name)) for name in names)


IMAGES = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_IMAGES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
SIDES_OF_IMAGES = {"image_size": 28, "patch_size": 14}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "whole", "images"),
    [
        ("gemma3", "gemma3", IMAGES | SIDES_OF_IMAGES),
        (
            "llama4",
            "llama4",
            IMAGES
            | SIDES_OF_IMAGES
            | dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
        ),
        ("qwen3_5", "qwen3_5", QWEN_IMAGES),
        ("qwen3_5_moe", "qwen3_5_moe", QWEN_IMAGES),
        ("qwen3", "qwen3_vl", QWEN_IMAGES | {"deepstack_visual_indexes": []}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_language_model_of_one_that_sees_is_taken_out_of_it(
    name: str, whole: str, images: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    if whole not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {whole}")
    config = transformers.AutoConfig.for_model(whole, text_config=dict(MODELS[name][1]), vision_config=images)
    theirs = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path / "hf")
    if name.endswith("moe"):
        stack_experts(tmp_path / "hf")
    done = convert.from_hugging_face(tmp_path / "hf", tmp_path / "ours")
    assert done.left_out and all("vis" in name or "projector" in name for name in done.left_out)
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "text")
    alone = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", attn_implementation="eager", dtype=torch.float32
    ).eval()
    ours = Generator(tmp_path / "hf", text=Text(ByteTokenizer()))
    tokens = [5, 7, 11, 13, 17, 19, 23, 29, 31]
    # The forward around Llama 4's language model reads a field that transformers 5.24 took from it.
    speaker = theirs.language_model if name == "llama4" else theirs
    with torch.no_grad():
        expected = speaker(torch.tensor([tokens])).logits[0, -1]
        assert torch.equal(alone(torch.tensor([tokens])).logits[0, -1], expected)
        found = ours._plain_step([tokens])([[]])[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def stack_experts(folder: Path) -> None:
    """Store the experts of each layer in one tensor, as Qwen 3.5 is published."""
    tensors = tensors_in(folder)
    places = sorted({name.split("experts.")[0] for name in tensors if ".experts." in name})
    for place in places:
        parts: dict[str, list[Tensor]] = {}
        for kind in ("gate", "up", "down"):
            names = [f"{place}experts.{expert}.{kind}_proj.weight" for expert in range(6)]
            parts[kind] = [tensors.pop(name) for name in names]
        stacked = {kind: torch.stack(each) for kind, each in parts.items()}
        tensors[f"{place}experts.gate_up_proj"] = torch.cat((stacked["gate"], stacked["up"]), 1)
        tensors[f"{place}experts.down_proj"] = stacked["down"]
    save_file(tensors, folder / "model.safetensors")


def test_modules_of_a_qwen3_next_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    skip_unless_there("qwen3_next")
    model, _ = hugging_face("qwen3_next", tmp_path / "hf")
    model.save_pretrained(tmp_path / "hf")
    tensors = tensors_in(tmp_path / "hf") | {"mtp.fc.weight": torch.ones(32, 64)}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    done = convert.from_hugging_face(tmp_path / "hf", tmp_path / "ours")
    assert done.left_out == ["mtp.fc.weight"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "mixtral", "deepseek", "sinks", "windows", "capped", "chunks"]
)
def test_transformers_reads_what_was_trained_here(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    spec = (OUR_MODELS | FORMS)[name]
    ours = model_files.write_checkpoint(spec, tmp_path / "ours", iteration=7)
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "hf")
    config = config_in(tmp_path / "hf")
    assert config["eos_token_id"] == 256 and config["torch_dtype"] == "float32"
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {config['model_type']}")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager", dtype=torch.float32
    ).eval()
    tokens = torch.randint(0, spec.vocab, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = ours(tokens)[..., : spec.vocab]
        logits = theirs(tokens).logits
    assert logits.shape == expected.shape
    assert (logits - expected).norm() <= 1e-4 * expected.norm()
    # Padded rows are padded again.
    convert.from_hugging_face(tmp_path / "hf", tmp_path / "back")
    first, second = StoredModel(tmp_path / "ours"), StoredModel(tmp_path / "back")
    assert first.iteration == 7
    assert first.tensors.wholes == second.tensors.wholes
    assert all(torch.equal(first.tensors.read(name), second.tensors.read(name)) for name in first.shapes)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("gpt2", ["pp=2,schedule=zbv", "dp=2,zero=3,mbs=1"]),
        ("deepseek", ["tp=2,sp=1,ep=2", "tp=2,pp=2"]),
    ],
)
def test_any_layout_trains_a_converted_model(
    pool: WorkerPool, name: str, layouts: list[str], tmp_path: Path
) -> None:
    spec = OUR_MODELS[name]
    model_files.write_checkpoint(spec, tmp_path)
    # Samples may be shorter than those that the checkpoint states.
    spec = spec.model_copy(update={"seq": 16})
    alone = parse_layout("gbs=4", spec)
    [expected] = pool.run(model_files.loss_with_loaded_weights, 1, spec, alone, str(tmp_path))
    for words in layouts:
        layout = parse_layout(f"{words},gbs=4", spec)
        losses = pool.run(
            model_files.loss_with_loaded_weights, layout.world_size, spec, layout, str(tmp_path)
        )
        assert losses == pytest.approx([expected] * layout.world_size, rel=1e-5)


@pytest.mark.parametrize(("name", "layout"), [("gpt2", "dp=2,zero=3,mbs=1"), ("deepseek", "tp=2,pp=2,ep=2")])
def test_a_checkpoint_of_any_layout_is_exported(
    pool: WorkerPool, name: str, layout: str, tmp_path: Path
) -> None:
    spec, exported = OUR_MODELS[name], []
    for number, words in enumerate(("gbs=4", f"{layout},gbs=4")):
        split = parse_layout(words, spec)
        ours, theirs = tmp_path / f"ours{number}", tmp_path / f"theirs{number}"
        pool.run(model_files.save_untrained, split.world_size, spec, split, str(ours))
        convert.to_hugging_face(ours, theirs)
        exported.append(tensors_in(theirs))
    assert equal(*exported)


def test_weights_of_another_model_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    spec = OUR_MODELS["llama"]
    model_files.write_checkpoint(spec, tmp_path)
    other = spec.model_copy(update={"rope_theta": 500.0})
    with pytest.raises(
        RuntimeError, match=r"is of another model \(rope_theta 10000\.0\); give the same model"
    ):
        pool.run(model_files.loss_with_loaded_weights, 1, other, parse_layout("gbs=4", other), str(tmp_path))


@pytest.mark.slow
def test_number_formats_can_be_chosen_both_ways(tmp_path: Path) -> None:
    skip_unless_there("deepseek_v3")
    model, _ = hugging_face("deepseek_v3", tmp_path / "hf")
    model.save_pretrained(tmp_path / "hf")
    convert.from_hugging_face(tmp_path / "hf", tmp_path / "ours", dtype="bf16")
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "fp16", dtype="fp16")
    before, after = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "fp16")
    for name, tensor in after.items():
        # The biases that choose experts are fp32 in every model.
        bias = name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, before[name] if bias else before[name].bfloat16().half()), name
    config = config_in(tmp_path / "fp16")
    assert config.get("dtype", config.get("torch_dtype")) == "float16"


def test_names_of_a_gpt2_without_its_head_come_back(tmp_path: Path) -> None:
    skip_unless_there("gpt2")
    model, spec = hugging_face("gpt2", tmp_path / "hf")
    model.save_pretrained(tmp_path / "hf")
    bare = {n.removeprefix("transformer."): t for n, t in tensors_in(tmp_path / "hf").items()}
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 40, 40).tril() for layer in range(spec.layers)}
    save_file(bare | masks, tmp_path / "hf" / "model.safetensors")
    done = convert.from_hugging_face(tmp_path / "hf", tmp_path / "ours")
    assert done.left_out == [f"transformer.{name}" for name in masks]
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert equal(bare, tensors_in(tmp_path / "back"))


def test_blocks_of_fp8_are_multiplied_out_and_prediction_layers_left_out(tmp_path: Path) -> None:
    skip_unless_there("deepseek_v3")
    model, spec = hugging_face("deepseek_v3", tmp_path / "hf")
    model.save_pretrained(tmp_path / "hf")
    tensors = tensors_in(tmp_path / "hf")
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        factors = torch.rand(-(-rows // 16), -(-columns // 8), generator=generator) + 0.5
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = factors
        wide = torch.tensor(
            [[factors[row // 16, column // 8] for column in range(columns)] for row in range(rows)]
        )
        expected[name] = (tensors[name].float() * wide).bfloat16()
    predicted = f"model.layers.{spec.layers}.eh_proj.weight"
    tensors[predicted] = torch.ones(2)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    config = config_in(tmp_path / "hf")
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    done = convert.from_hugging_face(tmp_path / "hf", tmp_path / "ours")
    assert done.left_out == [predicted]
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert equal(expected, tensors_in(tmp_path / "back"))
    after = config_in(tmp_path / "back")
    assert "quantization_config" not in after and after["num_nextn_predict_layers"] == 0


def test_a_config_that_no_longer_fits_is_written_anew(tmp_path: Path) -> None:
    spec = OUR_MODELS["llama"]
    model_files.write_checkpoint(spec, tmp_path / "ours")
    other = config_for(spec) | {"rope_theta": 1.0}
    (tmp_path / "ours" / COMPANIONS / "config.json").write_text(json.dumps(other))
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert config_in(tmp_path / "back")["rope_theta"] == spec.rope_theta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": "none"}, "the nearest one differs in position"),
        ({"qk_norm": True, "qkv_bias": True}, "the nearest one differs in q"),
        ({"experts": 4, "top_k": 2, "expert_ffn": 96, "router": Router(score="sigmoid")}, "router"),
    ],
)
def test_a_model_that_no_architecture_is_is_refused(change: dict[str, Any], message: str) -> None:
    spec = ModelSpec.model_validate(OUR_MODELS["llama"].model_dump() | change)
    with pytest.raises(InputError, match=f"none of the Hugging Face architectures gpt2, .*{message}"):
        config_for(spec)


def spoil(folder: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of the only file in `folder`; None removes one."""
    path = folder / "model.safetensors"
    there = load_file(path) | tensors
    save_file({name: tensor for name, tensor in there.items() if tensor is not None}, path)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({UP: None}, rf"{UP} missing, which a mistral of this config\.json has"),
        ({UP: torch.ones(3, 4)}, rf"{UP} has the shape \[3, 4\], but by config\.json it is \[48, 32\]"),
        ({UP: torch.ones(48, 32, dtype=torch.int8)}, f"{UP} is quantised"),
        ({UP: torch.ones(48, 32).to(torch.float8_e4m3fn)}, f"{UP} is quantised"),
        ({"model.layers.1.extra": torch.ones(2)}, r"no place for model\.layers\.1\.extra in a mistral"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    llama: Path, tensors: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    spoil(llama, **tensors)
    with pytest.raises(InputError, match=message):
        convert.from_hugging_face(llama, tmp_path / "ours")
    assert not list(tmp_path.glob("ours*"))


def test_files_that_are_broken_are_named(llama: Path, tmp_path: Path) -> None:
    path, index = llama / "model.safetensors", llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(InputError, match=r"model-00001-of-00002\.safetensors is missing, which"):
        HuggingFaceModel(llama)
    index.write_text(json.dumps({"weight_map": {"a": "../../model.safetensors"}}))
    with pytest.raises(InputError, match=r"tensor a is missing, which model\.safetensors\.index\.json"):
        HuggingFaceModel(llama)
    index.write_text('{"weight_map": [1]}')
    with pytest.raises(InputError, match="not an index of safetensors files"):
        HuggingFaceModel(llama)
    index.unlink()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(InputError, match=r"model\.safetensors: no safetensors file that can be read"):
        HuggingFaceModel(llama)
    path.rename(llama / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle; save the model with safe_serial"):
        HuggingFaceModel(llama)


def test_nothing_is_left_of_a_conversion_that_fails(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours.partial").mkdir()
    (tmp_path / "ours.partial" / "left").write_text("by a process that was killed")
    read, calls = HuggingFaceModel.read, []
    errors: list[BaseException] = [OSError(28, "No space left on device"), KeyboardInterrupt()]
    for error, seen in zip(errors, (InputError, KeyboardInterrupt), strict=True):

        def fail(self: HuggingFaceModel, entry: Any, error: BaseException = error) -> Tensor:
            calls.append(entry)
            if len(calls) % 5 == 0:
                raise error
            return read(self, entry)

        with monkeypatch.context() as patched:
            patched.setattr(HuggingFaceModel, "read", fail)
            with pytest.raises(seen, match="No space left on device" if seen is InputError else None):
                convert.from_hugging_face(llama, tmp_path / "ours")
        assert not list(tmp_path.glob("ours*"))
    convert.from_hugging_face(llama, tmp_path / "ours")
    with pytest.raises(InputError, match=r"--output .*ours: exists already; name a new folder"):
        convert.from_hugging_face(llama, tmp_path / "ours")


def test_a_checkpoint_that_was_damaged_is_not_exported(tmp_path: Path) -> None:
    model_files.write_checkpoint(OUR_MODELS["llama"], tmp_path / "ours")
    [file] = (tmp_path / "ours" / "iter_0000000").glob("*.distcp")
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)
    with pytest.raises(
        InputError, match=rf"{file.name}: the file is damaged: it differs from what was saved"
    ):
        convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_pieces_are_spread_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FILE_BYTES < 2**30
    monkeypatch.setattr("runtime.checkpoint.tensor_store.FILE_BYTES", 50_000)
    model = model_files.write_checkpoint(OUR_MODELS["llama"], tmp_path)
    assert len(list((tmp_path / "iter_0000000").glob("*.distcp"))) > 5
    stored = StoredModel(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(stored.tensors.read(name), tensor)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2GiB", 2**31), ("77", 77)]
)
def test_sizes_of_files_are_read(text: str, size: int) -> None:
    assert file_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "5XB", "-1GB", "GB", "1e9"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a size such as 5GB or 500MB"):
        file_size(text)
