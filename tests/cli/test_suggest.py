"""The command line: what is printed where, exit codes, and start-up."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli import main as command_line
from planner import Plan
from tests.support.scripts import MINDSPEED

ROOT = Path(__file__).parents[2]


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `planner` with some words: exit code, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["planner", *words])
        with pytest.raises(SystemExit) as stop:
            command_line.main()
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out, printed.err

    return run


SMALL = ("suggest", "--model", "gpt2-124m", "--world-size", "8", "--device", "a100-80g")


def test_json_holds_the_ranked_plans_and_the_whole_account(planner: Any) -> None:
    started = time.perf_counter()
    code, out, err = planner(
        "suggest", "--world-size", "64", "--max-global-batch-size", "16", "--json", "--top", "3"
    )
    taken = time.perf_counter() - started
    answer = json.loads(out)
    assert code == 0
    assert len(answer["plans"]) == 3
    for plan in answer["plans"]:
        assert plan["fits"] is True
        assert plan["layout"]["global_batch_size"] <= 16
        assert plan["estimate"]["step_time_s"] > 0
    speeds = [plan["estimate"]["tokens_per_s"] for plan in answer["plans"]]
    # The first is the simplest of those that tie, and the others go by speed.
    assert speeds[1:] == sorted(speeds[1:], reverse=True) and speeds[0] <= speeds[1]
    assert (answer["prefer"], answer["fastest_place"]) == ("simple", 2)
    assert answer["headroom_gib"] == pytest.approx(2)
    chances = [plan["chance_faster"] for plan in answer["plans"]]
    assert chances[0] is None and all(0 < chance < 1 for chance in chances[1:])
    assert [chance > 0.5 for chance in chances[1:]] == [speed > speeds[0] for speed in speeds[1:]]
    too_big = answer["rejected"].get("device_memory", 0)
    assert answer["considered"] == answer["legal"] + sum(answer["rejected"].values()) - too_big
    assert answer["legal"] == answer["feasible"] + too_big
    assert 0 < answer["elapsed_s"] < taken
    assert answer["model"]["name"] == "gpt-22b"
    assert "gpt-22b" in err and "a100-80g" in err


def test_the_report_says_model_cluster_assumptions_winner_and_rejections(planner: Any) -> None:
    code, out, err = planner("suggest", "--world-size", "64", "--max-global-batch-size", "16")
    assert (code, err) == (0, "")
    for text in (
        "gpt-22b: 22.1 B parameters",
        "64 x a100-80g",
        "assumed: no model given",
        "next: ",
    ):
        assert text in out
    assert "rejected: " not in out
    code, whole, _ = planner("suggest", "--world-size", "64", "--max-global-batch-size", "16", "--verbose")
    assert code == 0 and "why:" in whole and "rejected: " in whole
    for text in (out, whole):
        assert max(map(len, text.splitlines())) <= 80
        # The plan comes first, and then how it is run.
        assert text.startswith("tp=") and "\nrun: planner launch --plan plan.json" in text


def test_a_plan_of_other_software_is_exported_and_one_that_is_saved_is_named(
    planner: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "my.json")
    _, out, _ = planner(*SMALL, "--global-batch-size", "64", "--engine", "torchtitan", "--save", path)
    # The path is wrapped where it does not fit.
    assert f"run:plannerexport{path}--totorchtitan" in "".join(out.split())
    assert "after --save" not in out


@pytest.mark.parametrize("columns", ["40", "60", "80", "95", "200"])
@pytest.mark.parametrize(
    "pins", ["", "--pin recompute=selective --recompute-modules core_attn,layernorm,mlp"]
)
def test_no_number_is_cut_in_any_terminal(
    planner: Any, monkeypatch: pytest.MonkeyPatch, columns: str, pins: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    asked = (*SMALL, "--global-batch-size", "64", "--top", "2", *pins.split())
    code, out, _ = planner(*asked, "--json")
    best = json.loads(out)["plans"][0]["estimate"]
    for more in ((), ("--verbose",)):
        code, out, _ = planner(*asked, *more)
        assert code == 0 and "…" not in out
        assert f"{best['tokens_per_s_per_device']:,.0f}" in out
        assert f"{100 * best['mfu']:.1f} %" in out
        assert f" {best['peak_memory_bytes'] / 2**30:.1f} GiB" in out
    assert f" {best['peak_memory_bytes'] / 2**30:.1f}\n" in out


def test_save_writes_a_plan_that_loads(planner: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = planner(*SMALL, "--global-batch-size", "64", "--json", "--save", str(path))
    assert code == 0 and "saved" in err
    assert Plan.load(path).layout.model_dump(mode="json") == json.loads(out)["plans"][0]["layout"]


def test_pins_and_megatrons_flags_are_obeyed(planner: Any) -> None:
    words = ("--global-batch-size", "64", "--json", "--top", "5")
    grid = ("--pin", "dp=4", "--pin", "tp=2")
    _, by_pin, _ = planner(*SMALL, *words, *grid, "--pin", "sp=true", "--pin", "zero=1")
    _, by_flag, _ = planner(
        *SMALL, *words, *grid, "--sequence-parallel", "--use-distributed-optimizer", "--bf16"
    )
    assert json.loads(by_pin)["plans"] == json.loads(by_flag)["plans"]
    for plan in json.loads(by_pin)["plans"]:
        layout = plan["layout"]
        assert (layout["tensor_parallel"], layout["sequence_parallel"], layout["zero_stage"]) == (2, True, 1)


def test_megatrons_switches_do_nothing_in_a_group_of_one(planner: Any) -> None:
    switches = ("--use-distributed-optimizer", "--sequence-parallel")
    words = ("suggest", "--world-size", "8", "--global-batch-size", "32", "--json")
    code, out, _ = planner(*words, *switches, "--tensor-model-parallel-size", "8")
    answer = json.loads(out)
    assert code == 0
    assert {
        (plan["layout"]["zero_stage"], plan["layout"]["sequence_parallel"]) for plan in answer["plans"]
    } == {(0, True)}
    assert answer["pins"]["zero_stage"] == "1 where possible"
    too_big = answer["rejected"].get("device_memory", 0)
    assert answer["considered"] == answer["legal"] + sum(answer["rejected"].values()) - too_big
    code, _, err = planner(*words, "--tensor-model-parallel-size", "8", "--pin", "zero_stage=1")
    assert code == 2 and "zero_stage 1 needs data_parallel of at least 2" in err


PASTED = [
    *("--train-iters", "100", "--lr", "2.0e-4", "--min-lr", "2.0e-4", "--log-interval", "10"),
    *("--vocab-file", "gpt2-vocab.json", "--merge-file", "gpt2-merges.txt", "--data-path", "wikitext_text"),
]


def test_a_pasted_training_command_is_planned_and_says_what_it_does_not_use(planner: Any) -> None:
    words = (*SMALL, "--max-global-batch-size", "32", "--json")
    _, plain, _ = planner(*words)
    code, out, err = planner(*words, *PASTED)
    answer = json.loads(out)
    assert code == 0
    assert answer["plans"] == json.loads(plain)["plans"]
    assert json.loads(plain)["notes"] == []
    (note,) = answer["notes"]
    assert note.startswith("not used for planning: ")
    given = {word for word in PASTED if word.startswith("--")}
    assert set(note.partition(": ")[2].split(", ")) == given
    assert f"planner: note: {note}" in err
    code, out, _ = planner(*SMALL, "--max-global-batch-size", "32", *PASTED)
    assert "note: not used for planning: --train-iters" in out


def test_mindspeeds_guide_is_planned_as_it_stands_on_eight_devices(planner: Any) -> None:
    words = ("suggest", "--world-size", "8", "--device", "ascend-910b", "--json")
    code, out, _ = planner(*words, *MINDSPEED.split())
    answer = json.loads(out)
    assert code == 0
    assert 10e9 < answer["model"]["parameters"] < 12e9
    best = answer["plans"][0]
    assert best["fits"] is True
    layout = best["layout"]
    assert (layout["tensor_parallel"], layout["sequence_parallel"], layout["zero_stage"]) == (2, True, 1)
    assert (layout["expert_parallel"], layout["offload_activations"]) == (2, True)
    assert layout["recompute_modules"] == ["activation"]


def test_save_names_the_plan_also_beside_flags_of_a_run(planner: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, _ = planner(
        *SMALL, "--global-batch-size", "64", "--json", "--save", str(path), "--log-interval", "5"
    )
    assert code == 0 and path.is_file()
    assert json.loads(out)["notes"] == ["not used for planning: --log-interval"]


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (("--model", "gpt2-124m"), []),
        (("--model", "mixtral-8x7b"), ["the fullest device may take in 25 % more rows than the mean"]),
        (("--model", "mixtral-8x7b", "--pin", "ep=1"), []),
        (("--model", "mixtral-8x7b", "--moe-expert-capacity-factor", "1.25"), []),
        (
            (
                *("--model", "mixtral-8x7b", "--engine", "megatron", "--pin", "etp=1"),
                *("--moe-grouped-gemm", "--use-flash-attn"),
            ),
            ["may take in 25 % more rows", "not used for planning: --use-flash-attn, --moe-grouped-gemm"],
        ),
        (("--model", "mixtral-8x7b", "--moe-grouped-gemm", "--pin", "ep=1"), []),
        (
            ("--model", "gpt2-124m", "--reuse-fp32-param", "--bf16", "--pin", "zero=0"),
            ["--reuse-fp32-param saves nothing here; --use-distributed-optimizer splits"],
        ),
        (("--model", "gpt2-124m", "--reuse-fp32-param", "--bf16", "--use-distributed-optimizer"), []),
        (("--model", "gpt2-124m", "--pin", "precision=fp8"), []),
        (("--model", "gpt2-124m", "--fp16"), []),
        (("--model", "qwen3-8b"), []),
        (("--model", "gpt2-124m", "--bf16", "--lr", "1e-4"), ["not used for planning: --lr"]),
    ],
)
def test_plans_that_the_runtime_cannot_train_are_noted(
    planner: Any, words: tuple[str, ...], notes: list[str]
) -> None:
    command = ("suggest", "--world-size", "16", "--global-batch-size", "16", "--device", "h100", *words)
    code, out, err = planner(*command, "--json", "--top", "1")
    every = json.loads(out)["notes"]
    assert code == 0
    assert len(every) == len(notes)
    assert all(part in note for part, note in zip(notes, every, strict=True))
    assert err.count("planner: note: ") == len(every)
    _, printed, _ = planner(*command, "--top", "1")
    assert printed.count("note: ") == len(every)


def test_when_nothing_fits_the_closest_plans_are_shown_and_the_code_is_3(planner: Any) -> None:
    words = ("suggest", "--world-size", "1", "--max-global-batch-size", "16", "--device", "a100-80g")
    code, out, err = planner(*words, "--json", "--top", "2")
    answer = json.loads(out)
    assert code == 3
    assert [plan["fits"] for plan in answer["plans"]] == [False, False]
    assert answer["feasible"] == 0
    last = err.strip().splitlines()[-1]
    assert last.startswith("planner: error: no layout of gpt-22b fits 1 x a100-80g") and "lacks" in last
    code, out, err = planner(*words)
    assert code == 3
    assert "closest:" in out and "fits" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("suggest",), "no world size: give --world-size"),
        (("suggest", "--world-size", "many"), "'--world-size': 'many' is not a whole number"),
        (("suggest", "--world-size", "8"), "give --global-batch-size or --max-global-batch-size"),
        ((*SMALL, "--max-global-batch-size", "8", "--model", "gpt-9"), "unknown model 'gpt-9'"),
        ((*SMALL, "--max-global-batch-size", "8", "--top", "0"), "--top 0: must be at least 1"),
        (
            (*SMALL, "--max-global-batch-size", "8", "--pin", "tp=3"),
            "tp 3 does not divide world size 8",
        ),
        (
            (*SMALL, "--max-global-batch-size", "8", "--pin", "tp=8"),
            "tp 8 does not divide 12 heads",
        ),
        (
            (*SMALL, "--global-batch-size", "7", "--pin", "dp=8"),
            "a batch of 7 is too small for 8 devices",
        ),
        (
            ("suggest", "--world-size", "12", "--max-global-batch-size", "8"),
            "use 8 or 16, or a local world size of 6",
        ),
        ((*SMALL, "--max-global-batch-size", "8", "--train-iters", "x"), "'x' is not a whole number"),
        (
            (*SMALL, "--max-global-batch-size", "8", "--save", "/none/plan.json"),
            "plan /none/plan.json: cannot be written",
        ),
        ((*SMALL, "--no-such-flag"), "--no-such-flag"),
        (("sugest",), "sugest"),
    ],
)
def test_wrong_input_ends_in_one_line_on_stderr_and_code_2(
    planner: Any, words: tuple[str, ...], line: str
) -> None:
    code, _, err = planner(*words)
    assert code == 2
    assert err.startswith("planner: error: ") and err.count("\n") == 1
    assert line in err


def test_the_memory_variable_decides_what_fits(planner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("suggest", "--world-size", "8", "--max-global-batch-size", "16", "--json")
    feasible = []
    for memory in ("80", "64", "1"):
        monkeypatch.setenv("DEVICE_MEMORY_GB", memory)
        code, out, _ = planner(*words)
        feasible.append(json.loads(out)["feasible"])
    assert feasible[0] > feasible[1] > feasible[2] == 0
    assert code == 3


def test_help_and_version(planner: Any) -> None:
    code, out, _ = planner("--help")
    assert code == 0
    assert all(name in out for name in command_line.COMMANDS)
    code, out, err = planner()
    assert code == 2 and "suggest" in out and err == ""
    code, out, _ = planner("--version")
    assert code == 0 and out.startswith("planner ")
    code, out, _ = planner("suggest", "--help")
    assert code == 0 and "--max-global-batch-size" in out
    assert "--train-iters" not in out and "pasted" in out


def test_suggest_loads_neither_torch_nor_what_it_does_not_draw_with() -> None:
    script = (
        "import sys; sys.argv = 'planner suggest --world-size 64 --max-global-batch-size 16 --json'.split()\n"
        "import atexit; atexit.register(lambda: print(sorted({'torch', 'rich', 'networkx', 'tokenizers',"
        " 'scipy', 'numpy.ma', 'planner.solve.mixed_nodes'} & set(sys.modules)), file=sys.stderr))\n"
        "from cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"
    assert json.loads(done.stdout)["feasible"] > 0


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "planner", "suggest", "--world-size", "8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "planner: error: no batch size: give --global-batch-size or --max-global-batch-size\n"
    )


def test_what_is_not_usual_has_its_column_or_word(planner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*SMALL, "--global-batch-size", "64", "--top", "2", "--pin", "cp=2", "--pin", "pp=2")
    unusual = (
        "--cp-comm-type",
        "p2p",
        "--pipeline-schedule",
        "zbv",
        "--num-distributed-optimizer-instances",
        "2",
        "--swap-attention",
        "--optimizer-cpu-offload",
        "--optimizer",
        "sgd",
        "--grad-reduce-in-bf16",
        "--recompute-activations",
        "--recompute-modules",
        "layernorm,moe_act",
    )
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = planner(*words, *unusual, "--verbose")
    assert code == 0
    header = next(line for line in out.splitlines() if line.lstrip().startswith("# "))
    assert all(
        name in header.split() for name in ("schedule", "cp", "copies", "offload", "optimizer", "grads")
    )
    row = next(line for line in out.splitlines() if line.startswith("1 "))
    for text in ("zbv", "2 ring", "selective(norm+activation)", "activations+optimizer", "bf16"):
        assert text in row
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = planner(*words, *unusual)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert "schedule=zbv" in out and "cp_form=ring" in out
    monkeypatch.setenv("COLUMNS", "200")
    mixture = ("suggest", "--model", "mixtral-8x7b", "--world-size", "16", "--global-batch-size", "64")
    mixed_pins = ("--pin", "ep=4", "--pin", "etp=2", "--pin", "optimizer=adam8bit")
    _, out, _ = planner(*mixture, *mixed_pins, "--verbose")
    header = next(line for line in out.splitlines() if line.lstrip().startswith("# "))
    assert all(name in header.split() for name in ("ep", "etp", "optimizer"))
    assert "ep=4 etp=2" in out and "optimizer=adam8bit" in out
    plain_pins = ("--pin", "cp=1", "--pin", "schedule=1f1b")
    _, plain, _ = planner(*SMALL, "--global-batch-size", "64", *plain_pins, "--verbose")
    header = next(line for line in plain.splitlines() if line.lstrip().startswith("# "))
    assert "cp" not in header.split() and "schedule" not in header.split()


@pytest.mark.parametrize(
    ("device", "note", "is_run"),
    [
        ("tpu-v5p", "engine bundled does not run on tpu-v5p: priced as if it did", False),
        ("trainium2", "engine bundled does not run on trainium2: priced as if it did", False),
        ("gaudi3", "nobody has tried it there", True),
        ("vr200", "vr200 is announced: its figures are its maker's", True),
    ],
)
def test_plans_for_devices_that_nothing_has_run_on_say_so(
    planner: Any, device: str, note: str, is_run: bool
) -> None:
    code, out, _ = planner(*SMALL[:-1], device, "--max-global-batch-size", "32")
    assert code == 0 and note in " ".join(out.split())
    assert ("run: planner launch" in out) is is_run
    assert ("nothing here runs on" in out) is not is_run
