"""The command that compares the cost model with published measurements."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import accuracy
from benchmarks.calibration.scores import FITTED_SOURCES

ROOT = Path(__file__).parents[2]
MEASURED = ROOT.parent / "shared" / "measured"

ROW = {
    "source_id": "nvidia_dgxc",
    "row_status": "ok",
    "model_name": "llama-of-ours",
    "layers": "16",
    "hidden": "2048",
    "ffn": "8192",
    "heads": "32",
    "vocab": "32000",
    "seq": "4096",
    "gpu": "H100-80GB-SXM",
    "gpus": "8",
    "gpus_per_node": "8",
    "tp": "1",
    "pp": "1",
    "vpp": "1",
    "dp": "8",
    "cp": "1",
    "mbs": "1",
    "gbs": "64",
    "recompute": "none",
    "zero_stage": "1",
    "precision": "bf16",
    "flash": "1",
    "step_time_s": "1",
    "sweep_id": "one",
    "source_ref": "a table",
}


@pytest.fixture
def write(tmp_path):
    """Writes a CSV file of the usual row with other cells."""

    def make(name, *rows):
        path = tmp_path / name
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(ROW))
            table.writeheader()
            table.writerows({**ROW, **row} for row in rows)
        return str(path)

    return make


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process; returns what it prints."""

    def make(*arguments):
        monkeypatch.setattr("sys.argv", ["benchmarks.accuracy", *arguments])
        accuracy.main()
        return capsys.readouterr().out

    return make


def test_the_json_has_every_figure_of_every_source(write, run):
    rows = [{"mbs": mbs, "step_time_s": seconds} for mbs, seconds in (("1", "2"), ("2", "1.9"), ("4", "2.1"))]
    out = {"row_status": "oom", "mbs": "8", "step_time_s": ""}
    file = write("rows.csv", *rows, out, {"tp": ""}, {"source_id": "elsewhere"})
    found = json.loads(run("--rows", file, "--json"))
    assert list(found) == ["sources"]
    assert list(found["sources"]) == ["elsewhere", "nvidia_dgxc"]
    here = found["sources"]["nvidia_dgxc"]
    assert set(here) == {
        *("n", "skipped", "median_ape", "mean_ape", "p90_ape"),
        *("kendall_tau", "regret", "coverage_80", "oom", "memory"),
    }
    assert (here["n"], here["skipped"]) == (3, {"tp not published": 1})
    assert set(here["oom"]) == {"n", "precision_fits", "recall_fits"}
    assert here["oom"]["n"] == 1
    assert here["memory"] == {
        **dict.fromkeys(("median_ape", "mean_ape", "p90_ape", "bias", "coverage_80")),
        "n": 0,
        "engines": {},
    }
    assert 0 < here["median_ape"] <= here["p90_ape"]
    assert -1 <= here["kendall_tau"] <= 1
    assert 0 <= here["regret"] <= 100
    gone = found["sources"]["elsewhere"]
    assert (gone["n"], gone["skipped"]) == (0, {"source unknown: no engine": 1})
    assert gone["median_ape"] is gone["coverage_80"] is gone["oom"]["recall_fits"] is None


def test_a_source_may_be_spread_over_files_in_any_order(write, run):
    rows = [{"mbs": "1"}, {"mbs": "2"}, {"mbs": "4"}, {"seq": "8192"}]
    one, other = write("one.csv", *rows[:2]), write("other.csv", *rows[2:])
    whole = json.loads(run("--json", "--rows", write("all.csv", *rows)))
    assert json.loads(run("--json", "--rows", one, "--rows", other)) == whole
    found = json.loads(run("--json", "--rows", other, one))["sources"]["nvidia_dgxc"]
    expected = whole["sources"]["nvidia_dgxc"]
    assert found["n"] == 4
    for figure in ("median_ape", "mean_ape", "p90_ape", "kendall_tau", "regret"):
        assert found[figure] == pytest.approx(expected[figure])


def test_fit_scales_step_times_of_the_engine_and_device_it_saw(write, run):
    plain = accuracy.measure([write("rows.csv", {"step_time_s": "3"})])
    assert plain.scale == {}
    assert plain.scores["nvidia_dgxc"].median_ape > 1
    known = write("known.csv", {"step_time_s": "3"}, {"gpu": "A100", "step_time_s": "7"})
    result = json.loads(run("--rows", write("rows.csv", {"step_time_s": "3"}), "--fit", known, "--json"))
    assert result["sources"]["nvidia_dgxc"]["median_ape"] == pytest.approx(0, abs=1e-9)
    assert list(result["scalars"]) == ["nemo on a100-80g", "nemo on h100"]
    # Another engine has seen nothing.
    torch = write("torch.csv", {"source_id": "torchtitan"})
    assert accuracy.measure([torch], fit=[known]).scores == accuracy.measure([torch]).scores
    assert "Step times of nemo on h100 times" in run("--rows", torch, "--fit", known)


def test_held_out_leaves_out_what_the_constants_were_fitted_on(write):
    rows = [{"mbs": str(mbs), "gbs": str(512 * times)} for mbs in (1, 2, 4, 8) for times in range(1, 11)]
    file = write("rows.csv", *rows, *({**row, "source_id": "torchtitan"} for row in rows))
    assert "nvidia_dgxc" in FITTED_SOURCES
    found = accuracy.measure([file], held_out=True).scores
    assert found["torchtitan"].n == 40
    seen = found["nvidia_dgxc"].skipped[accuracy.HELD_OUT]
    assert 5 < seen < 30
    assert found["nvidia_dgxc"].n == 40 - seen
    # The same rows are left out of a file that holds a part of them.
    parts = [write("half.csv", *rows[20:]), write("rest.csv", *rows[:20])]
    half = accuracy.measure(parts, held_out=True).scores
    assert half["nvidia_dgxc"].skipped == found["nvidia_dgxc"].skipped


def test_the_tables_show_every_source_and_reason(write, run):
    file = write("rows.csv", {}, {"tp": ""}, {"source_id": "elsewhere"})
    printed = run("--rows", file)
    assert printed == run("--rows", file)
    lines = printed.splitlines()
    assert lines[0].split()[:2] == ["source", "n"]
    assert lines[1].split()[:2] == ["nvidia_dgxc", "1"]
    assert "tp not published" in printed
    assert "source unknown: no engine" in printed


def test_each_skipped_row_is_a_line_with_its_reason(write, monkeypatch, capsys, tmp_path):
    odd = tmp_path / "odd.csv"
    odd.write_text("a,b\n1,2\n")
    file = write("rows.csv", {}, {"tp": ""}, {"source_id": "elsewhere"})
    monkeypatch.setattr("sys.argv", ["benchmarks.accuracy", "--rows", file, str(odd)])
    accuracy.main()
    assert capsys.readouterr().err.splitlines() == [
        "rows.csv:3: nvidia_dgxc skipped: tp not published",
        "rows.csv:4: elsewhere skipped: source unknown: no engine",
        "odd.csv:1: odd.csv skipped: no column source_id: no table of measurements",
    ]


def test_engines_and_blanks_may_be_given_for_the_whole_file(write, run):
    file = write("rows.csv", {"source_id": "elsewhere", "gpu": "", "vpp": "", "pp": "2", "dp": "4"})
    given = ("--engine", "megatron", "--fill", "gpu=GH200-96GB")
    assert json.loads(run("--json", "--rows", file, *given))["sources"]["elsewhere"]["n"] == 1
    assert "vpp 1, 2, 4" in run("--rows", file, *given)
    for wrong in (("--engine", "of-nobody"), ("--fill", "gpu")):
        with pytest.raises(SystemExit) as end:
            run("--rows", file, *wrong)
        assert end.value.code == 2


@pytest.mark.parametrize("content", [None, b"\x89PNG\xff\xfe"])
def test_a_file_that_cannot_be_read_is_one_line_and_an_exit_code(tmp_path, content):
    file = tmp_path / "rows.csv"
    if content is not None:
        file.write_bytes(content)
    command = [sys.executable, "-m", "benchmarks.accuracy", "--json", "--rows", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("benchmarks.accuracy: error: ")
    assert str(file) in line


def test_a_reader_that_leaves_ends_it_without_a_word(write):
    command = [sys.executable, "-m", "benchmarks.accuracy", "--rows", write("runs.csv", {})]
    here, there = os.pipe()
    os.close(here)
    with os.fdopen(there, "wb") as gone:
        done = subprocess.run(command, cwd=ROOT, stdout=gone, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_nothing_that_can_be_read_is_an_empty_object(tmp_path, run):
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    assert json.loads(run("--rows", str(empty), "--json")) == {"sources": {}}


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the published measurements are not here")
def test_published_rows_are_scored(run):
    names = ("aleph_layouts", "korthikanti22", "megatron_golden", "simumax_b200", "vtrain_multi")
    files = [str(MEASURED / f"{name}.csv") for name in names]
    found = json.loads(run("--json", "--rows", *files))["sources"]
    assert list(found) == sorted(names)
    assert [found[name]["n"] for name in names] == [165, 10, 0, 22, 41]
    assert found["aleph_layouts"]["oom"]["n"] == 257
    assert found["simumax_b200"]["memory"]["n"] == 22
    # Megatron's golden steps tell of memory alone.
    assert found["megatron_golden"]["memory"]["n"] > 500
