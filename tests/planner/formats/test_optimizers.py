"""An optimizer whose states nobody priced leaves memory and time not known, in whatever software."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodels.errors import InputError
from planner import check, convert_config, export
from tests.planner.formats.test_objective import AXOLOTL, MEGATRON
from tests.planner.formats.test_unusual_settings import SHARDED
from tests.planner.test_public_files import NEMO

TITAN = (
    '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n'
    '[parallelism]\ntensor_parallel_degree = 2\n[optimizer]\nname = "{}"\n'
)
NEMOS = NEMO.replace("{", "{{").replace("}", "}}") + "  optim: {{name: {}}}\n"


@pytest.mark.parametrize(
    ("file", "text", "known", "other", "flag"),
    [
        ("train.sh", MEGATRON.format("pretrain_gpt.py --optimizer {}"), "muon", "lion", "--optimizer"),
        (
            "train.yml",
            AXOLOTL.format(f"{SHARDED}optimizer: {{}}"),
            "paged_adamw_8bit",
            "adamw_torch_4bit",
            "--optim",
        ),
        ("train.toml", TITAN, "AdamW", "Shampoo", "optimizer.name"),
        ("train.yaml", NEMOS, "fused_adam", "lion", "model.optim.name"),
    ],
)
def test_states_of_other_optimizers_are_not_priced(
    file: str, text: str, known: str, other: str, flag: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.write_text(text.format(known))
    fine = check(path, device="h100", world_size=8)
    assert fine.legal and fine.fits is not None and not fine.unknown, fine.problems
    path.write_text(text.format(other))
    found = check(path, device="h100", world_size=8)
    assert found.legal and (found.fits, found.plan, found.best) == (None, None, None)
    assert [one.flag for one in found.unknown] == [flag]
    with pytest.raises(InputError, match="states of this optimizer"):
        convert_config(path, to="megatron", device="h100", world_size=8)


def test_the_optimizer_of_deepspeeds_file_counts(tmp_path: Path) -> None:
    text = (
        '{{"bf16": {{"enabled": true}}, "train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "{}"}}, '
        '"gradient_accumulation_steps": 1, "zero_optimization": {{"stage": 3}}}}'
    )
    path = tmp_path / "ds.json"
    for name, unknown in (("AdamW", []), ("Lamb", ["optimizer.type"])):
        path.write_text(text.format(name))
        found = check(path, device="h100", world_size=8, model="llama2-7b")
        assert found.legal and [one.flag for one in found.unknown] == unknown


@pytest.mark.parametrize("mode", ["duplicated", "distributed", "blockwise", "layer_sharded"])
def test_modes_of_muon_are_read_and_written(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    words = f"pretrain_gpt.py --optimizer dist_muon --muon-tp-mode {mode}"
    path.write_text(MEGATRON.format(words))
    found = check(path, device="h100", world_size=8)
    assert found.legal and found.plan is not None and not found.unknown
    layout = found.plan.layout
    assert (layout.optimizer, layout.muon_mode, layout.zero_stage) == ("muon", mode, 1)
    written = export(found.plan, to="megatron")
    assert f"--muon-tp-mode {mode}" in written.text and "--use-distributed-optimizer" in written.text
    again = tmp_path / "again.sh"
    again.write_text(f"torchrun pretrain_gpt.py {' '.join(written.text.split())}")
    back = check(again, device="h100", world_size=8)
    assert back.plan is not None and back.plan.layout == layout
    path.write_text(MEGATRON.format(words.replace(mode, "sharded")))
    assert "expected one of duplicated" in str(check(path, device="h100", world_size=8).problems)
    path.write_text(MEGATRON.format(f"{words} --use-torch-fsdp2"))
    assert "has adam and sgd, not dist_muon" in str(check(path, device="h100", world_size=8).problems)
