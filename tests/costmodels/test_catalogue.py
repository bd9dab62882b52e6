"""The catalogues: every entry loads, matches what its authors published, and errors are one line."""

import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodels import catalogue
from costmodels.catalogue import (
    device_names,
    load_device,
    load_engine,
    load_model,
    local_machine,
    model_names,
    yaml_files,
)
from costmodels.catalogue.parsed_files import parsed_file
from costmodels.errors import InputError
from costmodels.spec.hardware import Device

OWN_MODELS = {"gpt2-nano", "llama-nano"}

# Billions of parameters that one token uses, as the authors print them. DeepSeek-V2-Lite's 2.4B is left out:
# its paper does not say which embeddings it counts.
ACTIVE_BILLIONS = {
    "mixtral-8x7b": 12.9,  # mistral.ai/news/mixtral-of-experts
    "mixtral-8x22b": 39.0,  # mistral.ai/news/mixtral-8x22b
    "qwen1.5-moe-a2.7b": 2.7,  # qwenlm.github.io/blog/qwen-moe
    "qwen2-57b-a14b": 14.0,  # arXiv:2407.10671
    "qwen3-30b-a3b": 3.3,  # huggingface.co/Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": 22.0,  # huggingface.co/Qwen/Qwen3-235B-A22B
    "deepseek-v2": 21.0,  # arXiv:2405.04434
    "deepseek-v3": 37.0,  # arXiv:2412.19437
    "kimi-k2": 32.6,  # arXiv:2507.20534
    "llama4-scout-17b-16e": 17.0,  # huggingface.co/meta-llama/Llama-4-Scout-17B-16E
}


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", model_names())
def test_parameters_match_the_published_count(name: str) -> None:
    model = load_model(name)
    assert model.source
    if name in OWN_MODELS:
        assert model.published_parameters == 0
    else:
        # "106 billion" is all that its authors say of the one.
        coarse = 0.01 if name == "glm-4.5-air" else 0.005
        assert model.parameters == pytest.approx(model.published_parameters, rel=coarse)


@pytest.mark.parametrize("name", [name for name in model_names() if name.startswith("sc21-")])
def test_parameters_round_to_the_printed_figure(name: str) -> None:
    printed = name.removeprefix("sc21-").removesuffix("b")
    decimals = len(printed.partition(".")[2])
    assert round(load_model(name).parameters / 1e9, decimals) == float(printed)


@pytest.mark.parametrize(("name", "billions"), ACTIVE_BILLIONS.items())
def test_active_parameters_match_the_published_count(name: str, billions: float) -> None:
    assert load_model(name).active_parameters == pytest.approx(billions * 1e9, rel=0.02)


def test_routers_are_those_of_the_papers() -> None:
    v3 = load_model("deepseek-v3").router
    # arXiv:2412.19437, sections 2.1.2 and 4.2: at most 4 of 8 nodes, ranked by the sum of their best two.
    assert (v3.score, v3.normalised, v3.scale, v3.expert_bias) == ("sigmoid", True, 2.5, True)
    assert (v3.groups, v3.top_groups, v3.group_score) == (8, 4, "top2")
    v2 = load_model("deepseek-v2").router
    # arXiv:2405.04434, section 3.1.2: 160 experts on 8 devices, of which a token uses at most 3.
    assert (v2.score, v2.normalised, v2.scale, v2.expert_bias) == ("softmax", False, 16.0, False)
    assert (v2.groups, v2.top_groups, v2.group_score) == (8, 3, "max")
    models = [load_model(name) for name in model_names()]
    gated = {model.name for model in models if model.shared_expert_gate}
    assert gated == {"qwen1.5-moe-a2.7b", "qwen2-57b-a14b", "qwen3-next-80b-a3b"}
    plain = {model.name for model in models if not model.router.normalised}
    assert plain == {*gated, "deepseek-v2-lite", "deepseek-v2", "llama4-scout-17b-16e"} - {
        "qwen3-next-80b-a3b"
    }


def test_releases_that_stretch_rotary_positions() -> None:
    kinds = {name: scaling.kind for name in model_names() if (scaling := load_model(name).rope_scaling)}
    llama = {"llama3.1-8b", "llama3.1-70b", "llama3-405b", "llama3.2-1b", "llama3.2-3b"}
    yarn = {"deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2", "gpt-oss-20b", "gpt-oss-120b"}
    linear = {"gemma-3-4b", "gemma-3-12b", "gemma-3-27b", "deepseek-coder-6.7b"}
    expected = dict.fromkeys({*llama, "llama4-scout-17b-16e"}, "llama3") | dict.fromkeys(yarn, "yarn")
    assert kinds == expected | dict.fromkeys(linear, "linear")
    plain, stretched = load_model("llama3-8b"), load_model("llama3.1-8b")
    assert stretched.rope_scaling is not None
    # arXiv:2405.04434, section 3.1.4, and arXiv:2412.19437, section 4.3: s = 40.
    for name, mscale in (("deepseek-v2", 0.707), ("deepseek-v3", 1.0)):
        scaling = load_model(name).rope_scaling
        assert scaling is not None
        assert (scaling.factor, scaling.mscale_all_dim, scaling.original_positions) == (40.0, mscale, 4096)
    same = {"name", "source", "rope_scaling"}
    assert plain.model_dump(exclude=same) == stretched.model_dump(exclude=same)


def test_the_models_that_guides_and_papers_name_are_there() -> None:
    sizes = {
        "gpt-22b": (48, 6144, 64, 50257, 2048),
        "sc21-1008b": (128, 25600, 160, 51200, 2048),
        "korthikanti-530b": (105, 20480, 128, 51200, 2048),
        "mindformers-gpt2-52b": (64, 8192, 32, 50257, 1024),
        "llama3-405b": (126, 16384, 128, 128256, 8192),
    }
    for name, size in sizes.items():
        model = load_model(name)
        assert (model.layers, model.hidden, model.heads, model.vocab, model.seq) == size
    assert load_model("mindformers-gpt-70b").kv_heads == 8
    assert len([name for name in model_names() if name.startswith("sc21-")]) == 10


def test_names_and_aliases_are_unique_and_lead_to_their_entry() -> None:
    seen: dict[str, str] = {}
    for name in model_names():
        aliases = catalogue._aliases_of_model(name)
        for word in (name, *aliases):
            assert re.fullmatch(r"[a-z0-9.-]+", word)
            assert seen.setdefault(word, name) == name
            assert load_model(word).name == name
    devices = yaml_files.catalogue_file("devices.yaml")["devices"]
    for name, fields in devices.items():
        for word in (name, *fields.get("aliases", [])):
            assert re.fullmatch(r"[a-z0-9.-]+", word)
            assert seen.setdefault(word, name) == name
            assert load_device(word).name == name


@pytest.mark.parametrize(
    ("alias", "name"),
    [("gpt2", "gpt2-small"), ("GPT2-355M", "gpt2-medium"), (" llama3.1-405b ", "llama3-405b")],
)
def test_aliases(alias: str, name: str) -> None:
    assert load_model(alias).name == name


def test_overrides_replace_fields_and_drop_the_published_count() -> None:
    whole = load_model("llama3-8b")
    assert load_model("llama3-8b", seq=2048).published_parameters == whole.published_parameters
    half = load_model("llama3-8b", layers=16)
    assert half.layers == 16
    assert half.published_parameters == 0
    assert load_model("llama3-8b") == whole  # the shared file content is untouched


@pytest.mark.parametrize("name", device_names())
def test_devices_are_complete(name: str) -> None:
    device = load_device(name)
    assert device.source
    assert device.architecture
    assert device.default_precision in device.peak_flops
    assert device.inter_node.bandwidth <= device.intra_node.bandwidth
    assert device.inter_node.latency >= device.intra_node.latency
    assert device.context_bytes < 0.1 * device.memory_bytes
    island = device.island or device.devices_per_node
    assert max(island, device.devices_per_node) % min(island, device.devices_per_node) == 0
    assert (device.nics_per_node or 1) <= device.devices_per_node
    flops = [device.peak_flops[kind] for kind in ("fp32", "tf32", "bf16", "fp8") if kind in device.peak_flops]
    assert flops == sorted(flops)


GIGABYTES = {
    "v100-16g": 16, "v100-32g": 32, "a100-40g": 40, "a100-80g": 80, "a100-pcie-40g": 40, "a100-pcie-80g": 80,
    "a800-80g": 80, "h100": 80, "h100-pcie": 80, "h800": 80, "h200": 141, "h20": 96, "b200": 180,
    "gb200": 186, "b300": 270, "gb300": 279, "l40s": 48, "mi250x": 64, "mi300x": 192, "ascend-910": 32,
    "ascend-910b": 64, "rtx-4090": 24, "rtx-5090": 32, "a10": 24, "l4": 24, "t4": 16,
    "a40": 48, "rtx-a6000": 48, "rtx-6000-ada": 48, "rtx-3090": 24,
}  # fmt: skip


@pytest.mark.parametrize(("name", "gigabytes"), GIGABYTES.items())
def test_device_memory_is_close_to_the_name_of_the_product(name: str, gigabytes: int) -> None:
    # Vendors count in units between 10^9 and 2^30 bytes, and drivers keep a little.
    assert gigabytes * 1e9 * 0.98 < load_device(name).memory_bytes <= gigabytes * 2**30


def test_peaks_are_dense() -> None:
    assert load_device("h100").peak_flops["bf16"] == pytest.approx(989.4e12)
    assert load_device("a100").peak_flops["fp16"] == pytest.approx(312e12)
    assert load_device("b200").peak_flops["fp8"] == pytest.approx(4500e12)
    assert load_device("gb300").peak_flops["fp8"] == pytest.approx(5000e12)
    assert "bf16" not in load_device("v100").peak_flops


def test_links_are_those_of_the_data_sheets() -> None:
    racks = {name for name in device_names() if (load_device(name).island or 0) > 8}
    sizes = {"gb200": 72, "gb300": 72, "vr200": 72, "ascend-910c": 384, "tpu-v5p": 8960, "tpu-v6e": 256}
    assert {name: load_device(name).island for name in racks} == sizes
    nvidia = [load_device(name) for name in racks if load_device(name).vendor == "NVIDIA"]
    assert all(device.devices_per_node == 4 for device in nvidia)
    meshes = {name for name in device_names() if load_device(name).intra_node.wiring == "mesh"}
    assert meshes == {"gh200", "mi300x", "mi325x", "mi350x", "mi355x", "gaudi3", "ascend-910", "ascend-910b"}
    # Cards of 100, 200 and 400 Gb/s that two devices share.
    shared = {"v100-16g": 100, "v100-32g": 100, "a100-pcie-40g": 200, "a100-pcie-80g": 200, "l40s": 200}
    shared |= {"mi250x": 200, "h100-pcie": 400, "h100-nvl": 400}
    # One for a server of eight.
    shared |= dict.fromkeys(("rtx-3090", "rtx-4090", "rtx-5090", "a10", "l4", "t4"), 100)
    shared |= dict.fromkeys(("a40", "rtx-a6000", "rtx-6000-ada"), 100)
    for name in device_names():
        device = load_device(name)
        cards = device.nics_per_node or device.devices_per_node
        card = device.inter_node.bandwidth * device.devices_per_node / cards
        assert name not in shared or card == pytest.approx(shared[name] * 1e9 / 8)
        assert (cards < device.devices_per_node) == (name in shared)


def test_a_device_without_bf16_trains_in_fp16() -> None:
    t4 = load_device("tesla-t4")
    assert set(t4.peak_flops) == {"fp32", "fp16"} and t4.default_precision == "fp16"
    assert load_device("RTX4090").name == load_device("4090").name == "rtx-4090"


def test_a_device_file_names_all_missing_fields_at_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("vendor: mine\nmemory_bytes: -1\nintra_node: {name: ring, latency: 1e-6}\ncors: 3\n")
    with pytest.raises(InputError) as error:
        load_device(str(file))
    message = one_line(error)
    assert (
        "fields peak_flops, memory_bandwidth, cores, intra_node.bandwidth and inter_node are missing"
        in message
    )
    assert "memory_bytes is -1" in message and "unknown field cors; did you mean cores?" in message


def test_the_template_of_a_device_loads_once_it_is_filled_in(tmp_path: Path) -> None:
    text = catalogue.device_template()
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        load_device(str(file))
    empty = (
        "vendor",
        "peak_flops.bf16",
        "memory_bytes",
        "intra_node.latency",
        "inter_node.bandwidth",
        "source",
    )
    assert all(name in one_line(error) for name in empty)
    # The examples stand in comments behind the empty fields and before those that may be left out.
    filled = re.sub(r"^(\s*\w+:) # ([\d.e+-]+).*$", r"\1 \2", text, flags=re.MULTILINE)
    filled = re.sub(r"^# (\w+: )", r"\1", filled, flags=re.MULTILINE)
    filled = re.sub(r"^(\s*(vendor|name|source)):.*$", r"\1: mine", filled, flags=re.MULTILINE)
    file.write_text(filled)
    device = load_device(str(file))
    assert device.model_fields_set == set(Device.model_fields)
    assert device.peak_flops["bf16"] == 989e12 and device.inter_node.latency == 14e-6


def test_every_engine_loads() -> None:
    names = catalogue.engine_names()
    assert names
    assert [load_engine(name).name for name in names] == names


@pytest.mark.parametrize(
    ("load", "name", "near", "listing"),
    [
        (load_model, "lama2-7b", "llama2-7b", "`planner models`"),
        (load_model, "gpt2-smal", "gpt2-small", "`planner models`"),
        (load_device, "h1000", "h100", "`planner devices`"),
        (load_engine, "megatrn", "megatron", "bundled"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(load, name, near, listing) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError) as error:
        load(name)
    message = one_line(error)
    assert repr(name) in message
    assert near in message
    assert listing in message


def test_a_user_adds_a_device_with_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "my-npu.yaml"
    file.write_text(
        "vendor: mine\nkind: npu\npeak_flops: {bf16: 100e12}\nmemory_bytes: 32e9\nmemory_bandwidth: 1.0e+12\n"
        "cores: 16\nintra_node: {name: ring, bandwidth: 50e9, latency: 1e-6}\n"
        "inter_node: {name: ethernet, bandwidth: 10e9, latency: 1e-5}\n"
    )
    device = load_device(str(file))
    assert device.name == "my-npu"
    assert device.peak_flops == {"bf16": 100e12}


def test_a_user_adds_a_model_with_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "my.yaml"
    file.write_text("name: mine\nlayers: 2\nhidden: 64\nheads: 4\nvocab: 100\nseq: 32\n")
    model = load_model(str(file), seq=16, max_positions=32)
    assert (model.name, model.ffn, model.head_dim, model.seq) == ("mine", 256, 16, 16)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("layers: 2\nhidden: 64\nheads: 5\nvocab: 9\nseq: 8\n", ["hidden 64 is not divisible by heads 5"]),
        ("layers: 2\nheads: 4\nvocab: 9\nseq: 8\nffn: 4\nhead_dim: 4\n", ["field hidden is missing"]),
        (
            "layers: 0\nhidden: 64\nheads: 4\nvocab: 9\nseq: 8\n",
            ["layers is 0", "greater than"],
        ),
        ("layers: 2\nhidden: [64]\nheads: 4\nvocab: 9\nseq: 8\nffn: 9\nhead_dim: 4\n", ["hidden is [64]"]),
        ("layers: 2\nhiden: 64\nhidden: 64\nheads: 4\nvocab: 9\nseq: 8\n", ["unknown field hiden", "hidden"]),
        ("layers: [2\nhidden: 64\n", ["not valid YAML at line 2"]),
        ("- 1\n- 2\n", ["mapping"]),
        ("", ["mapping"]),
    ],
)
def test_a_broken_model_file_is_named_with_its_fault(tmp_path, text, parts) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        load_model(str(file))
    for part in ("broken.yaml", *parts):
        assert part in one_line(error)


def test_a_missing_file_is_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError) as error:
        load_device(str(tmp_path / "none.yaml"))
    assert "none.yaml" in one_line(error)
    with pytest.raises(InputError) as error:
        load_model(str(tmp_path / "none.yml"))
    assert "none.yml" in one_line(error)


def test_a_model_and_devices_read_few_files() -> None:
    yaml_files.catalogue_file.cache_clear()
    catalogue._families.cache_clear()
    load_model("qwen2.5-72b")
    load_device("mi300x")
    load_device("cpu", ranks=2)
    # One of a family of models, and that of devices.
    assert yaml_files.catalogue_file.cache_info().misses == 2


def test_a_file_of_the_package_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file, seen = tmp_path / "some.yaml", []

    def parse(text: str, origin: str) -> dict[str, Any]:
        seen.append(origin)
        return yaml_files.parse(text, origin)

    file.write_text("a: [1, 2.5, yes]")
    assert [parsed_file(file, parse) for _ in range(2)] == [{"a": [1, 2.5, True]}] * 2
    assert seen == ["some.yaml"]
    file.write_text("a: another")
    assert parsed_file(file, parse) == {"a": "another"}
    (kept,) = (tmp_path / "__pycache__").iterdir()
    kept.write_bytes(kept.read_bytes()[:-3])
    assert parsed_file(file, parse) == {"a": "another"}
    # A date is no plain value; a folder that cannot be written changes nothing.
    file.write_text("a: 2026-01-01")
    kept.unlink()
    assert [parsed_file(file, parse)["a"].year for _ in range(2)] == [2026] * 2
    monkeypatch.setattr(sys, "pycache_prefix", str(file))
    assert parsed_file(file, parse)["a"].year == 2026
    assert len(seen) == 6


def test_the_host_is_divided_by_its_ranks() -> None:
    whole, share = load_device("cpu"), load_device("cpu", ranks=4)
    assert share.peak_flops["fp32"] == pytest.approx(whole.peak_flops["fp32"] / 4)
    assert share.memory_bandwidth == pytest.approx(whole.memory_bandwidth / 4)
    assert share.memory_bytes == pytest.approx(whole.memory_bytes / 4)
    assert share.cores == max(1, whole.cores // 4)
    assert whole.default_precision == "fp32"
    with pytest.raises(InputError, match="ranks is 0"):
        load_device("cpu", ranks=0)


def test_the_hosts_peak_is_above_a_measured_matrix_product() -> None:
    size = 1024
    left = np.ones((size, size), dtype=np.float32)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        left @ left
        seconds.append(time.perf_counter() - start)
    rate = 2 * size**3 / min(seconds)
    assert load_device("cpu").peak_flops["fp32"] > rate


def cpuinfo(vendor: str, family: int, model: int, name: str, flags: str) -> str:
    return (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
        f"model name\t: {name}\ncpu MHz\t\t: 2000.000\nflags\t\t: fpu sse {flags}\n"
    )


@pytest.mark.parametrize(
    ("text", "fp32", "bf16"),
    [
        (cpuinfo("AuthenticAMD", 23, 1, "AMD EPYC 7551", "avx avx2 fma"), 16, None),  # Zen 1
        (cpuinfo("AuthenticAMD", 23, 49, "AMD EPYC 7742", "avx avx2 fma"), 32, None),  # Zen 2
        (
            cpuinfo("AuthenticAMD", 25, 17, "AMD EPYC 9654", "avx2 fma avx512f avx512_bf16"),
            32,
            64,
        ),  # Zen 4
        (
            cpuinfo("AuthenticAMD", 26, 2, "AMD EPYC 9755", "avx2 fma avx512f avx512_bf16"),
            64,
            128,
        ),  # Zen 5
        (cpuinfo("GenuineIntel", 6, 85, "Intel(R) Xeon(R) Platinum 8168", "avx avx2 fma avx512f"), 64, None),
        (cpuinfo("GenuineIntel", 6, 143, "Intel(R) Xeon(R)", "fma avx512f avx512_bf16 amx_bf16"), 64, 2048),
        (cpuinfo("GenuineIntel", 6, 140, "11th Gen Intel(R) Core(TM) i7", "avx avx2 fma avx512f"), 32, None),
        (cpuinfo("GenuineIntel", 6, 42, "Intel(R) Core(TM) i7-2600", "avx"), 16, None),
        (cpuinfo("GenuineIntel", 6, 23, "Intel(R) Core(TM)2", ""), 8, None),
    ],
)
def test_flops_per_cycle_by_processor(monkeypatch, text, fp32, bf16) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    core = local_machine.describe_core(text)
    assert core.flops_per_cycle["fp32"] == fp32
    assert core.flops_per_cycle.get("bf16") == bf16
    assert core.clock == pytest.approx(2.0e9 * local_machine.TURBO)
    assert local_machine.describe_core(text, 3.5e9).clock == 3.5e9


def test_an_arm_server_states_no_clock(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", "linux")
    core = local_machine.describe_core(
        "processor\t: 0\nFeatures\t: fp asimd sve bf16\nCPU implementer\t: 0x41\n"
    )
    assert core.flops_per_cycle == {"fp32": 32, "bf16": 128}
    assert core.clock == local_machine.DEFAULT_CLOCK


def test_a_host_without_proc_is_described_too(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name in ("CPUINFO", "MEMINFO", "MAXIMAL_CLOCK"):
        monkeypatch.setattr(local_machine, name, tmp_path / "absent")
    monkeypatch.setattr(local_machine, "CGROUP_LIMITS", ())
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    local_machine.available_cores.cache_clear()
    device = local_machine.host_device(2)
    local_machine.available_cores.cache_clear()
    assert device.peak_flops["fp32"] > 0
    assert device.memory_bytes > 2**28


def test_a_container_limits_the_memory(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(local_machine, "CGROUP_LIMITS", (limit,))
    limit.write_text("max\n")
    unlimited = local_machine.available_memory()
    limit.write_text("1073741824\n")
    assert local_machine.available_memory() == 2**30 < unlimited
