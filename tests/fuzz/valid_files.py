"""Files of this project that a fuzzer corrupts, and how each is read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import planner
from costmodels import ModelSpec
from costmodels.catalogue import load_device, load_model
from costmodels.catalogue.yaml_files import yaml_loader
from costmodels.network.network_table import read_network_table
from costmodels.spec.model_flops import flops_per_sequence
from planner.inputs.model import resolve_model
from planner.plan import Plan
from runtime.data import IndexedWriter, build_datasets

SEQ = 16


@dataclass(frozen=True)
class Target:
    """One kind of file."""

    name: str
    files: Mapping[str, bytes]
    """Valid files by their path below the folder; those in `corrupted` are corrupted one at a time."""
    corrupted: tuple[str, ...]
    load: Callable[[Path], Any]
    """Reads the folder; what it returns compares equal for equal contents."""
    parse: Callable[[str], Any] | None = None
    checked: bool = False
    """Checksums guard the files: whatever loads must be what was written."""
    weight: int = 1
    """Share of the inputs."""
    mutate: Callable[[bytes, random.Random], bytes] | None = None
    """Corrupts half of the inputs in a way of this kind alone."""


def _json_target(name: str, content: Any, load: Callable[[Path], Any], weight: int = 1) -> Target:
    text = json.dumps(content, indent=1).encode()
    return Target(name, {"file.json": text}, ("file.json",), load, json.loads, weight=weight)


def _yaml_target(name: str, content: Any, load: Callable[[Path], Any], weight: int = 1) -> Target:
    text = yaml.safe_dump(content, sort_keys=False).encode()

    def parse(words: str) -> Any:
        return yaml.load(words, yaml_loader())

    return Target(name, {"file.yaml": text}, ("file.yaml",), load, parse, weight=weight)


def small_plan() -> Plan:
    """A plan of a pipeline over two nodes."""
    return planner.suggest("llama2-70b", world_size=16, max_global_batch_size=16, pin=["pp=4"])


def plan_target() -> Target:
    """The plan file of `small_plan`, as something to read."""
    plan = small_plan()

    def load(folder: Path) -> Any:
        loaded = Plan.load(folder / "file.json")
        loaded.layout.describe()
        return loaded.model_dump()

    return _json_target("plan", plan.model_dump(mode="json"), load, weight=3)


CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("configs.json").read_text())
"""The keys that count of published config.json files."""


def config_targets() -> list[Target]:
    """Hugging Face configurations."""

    def load(folder: Path) -> Any:
        return priced(resolve_model(folder / "file.json"))

    return [_json_target(f"config.json of {name}", one, load) for name, one in CONFIGS.items()]


def priced(model: ModelSpec) -> Any:
    """A model, whose sizes could be counted."""
    return model.model_dump(), model.parameters, flops_per_sequence(model)


def yaml_targets() -> list[Target]:
    """Models, devices and a network table as users write them."""
    dense = load_model("llama3-8b").model_dump(mode="json", exclude={"published_parameters"})
    experts = load_model("deepseek-v3").model_dump(mode="json", exclude={"published_parameters"})

    def model(folder: Path) -> Any:
        return priced(resolve_model(str(folder / "file.yaml")))

    def device(folder: Path) -> Any:
        return load_device(str(folder / "file.yaml")).model_dump()

    def table(folder: Path) -> Any:
        return [row.model_dump() for row in read_network_table(folder / "file.csv")]

    rows = ["collective,devices,nodes,busbw_gbs,bytes"]
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    rows += [f"{kind},{8 * nodes},{nodes},{300 / nodes:g},{2**28}" for kind in kinds for nodes in (1, 2, 4)]
    device_fields = load_device("h100-sxm").model_dump(mode="json")
    return [
        _yaml_target("model YAML", dense, model),
        _yaml_target("model YAML with experts", experts, model),
        _yaml_target("device YAML", device_fields, device, weight=2),
        Target("network table", {"file.csv": "\n".join(rows).encode()}, ("file.csv",), table),
    ]


def data_target(folder: Path) -> Target:
    """A small pair of `.bin` and `.idx`."""
    prefix = folder / "words"
    with IndexedWriter(str(prefix), "uint16") as writer:
        for number in range(40):
            writer.add_document([*range(number % 17, 40 + number % 11), 256])

    def load(where: Path) -> Any:
        datasets = build_datasets([str(where / "words")], "90,10,0", SEQ, 1234, 60, 8)
        assert datasets.train is not None and datasets.valid is not None
        rows = np.concatenate([datasets.train.batch(range(60)), datasets.valid.batch(range(8))])
        return rows.tolist()

    names = ("words.idx", "words.bin")
    files = {name: (folder / name).read_bytes() for name in names}
    return Target(
        ".idx and .bin", files, ("words.idx", "words.idx", "words.idx", "words.bin"), load, weight=4
    )


def saved_checkpoint(folder: str) -> None:
    """Write a checkpoint; runs in a process group of one rank."""
    import torch

    from runtime import checkpoint
    from runtime.settings.training_options import TrainingOptions
    from runtime.train.trainer import Trainer
    from tests.support.layouts import parse_layout
    from tests.support.models import MODELS

    fields = MODELS["gpt2"].model_dump() | {"layers": 1, "hidden": 16, "vocab": 30, "seq": 8, "ffn": 32}
    spec = ModelSpec.model_validate(fields)
    trainer = Trainer(spec, parse_layout("gbs=4", spec), TrainingOptions(), torch.device("cpu"))
    for iteration in (4, 8):
        trainer.iteration = trainer.updates = iteration
        checkpoint.save(folder, trainer, spec, {"consumed_samples": 4 * iteration, "seed": 1})


def checkpoint_targets(folder: Path) -> list[Target]:
    """A folder with two checkpoints, of which the newer is read; the file that names it has no checksum."""
    from runtime import checkpoint

    def load(where: Path) -> Any:
        iteration = checkpoint.latest_iteration(where)
        if iteration is None:
            return None
        newest = checkpoint.iteration_folder(where, iteration)
        run = checkpoint.read_run(newest)
        checkpoint.verify(newest)
        return run.model_dump(), {path.name: path.read_bytes() for path in sorted(newest.glob("*.distcp"))}

    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    newest = tuple(name for name in files if "iter_0000008" in name)
    return [
        Target("checkpoint", files, newest, load, checked=True, weight=6),
        Target("tracker of checkpoints", files, (checkpoint.TRACKER,), load),
    ]


def targets(folder: Path, with_checkpoint: bool = True) -> list[Target]:
    """All kinds of files, valid ones made in `folder`."""
    data = folder / "data"
    data.mkdir()
    from tests.fuzz.configurations import configuration_targets  # It makes targets of this module.

    found = [plan_target(), *config_targets(), *yaml_targets(), *configuration_targets(), data_target(data)]
    if with_checkpoint:
        from tests.support.worker_pool import WorkerPool

        saved = folder / "checkpoints"
        WorkerPool(1).run(saved_checkpoint, 1, str(saved))
        found += checkpoint_targets(saved)
    return found
