"""Corrupted files are refused in one line: some hundred here, thousands by `python -m tests.fuzz`."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.catalogue import load_model
from costmodels.errors import LONGEST_LINE, InputError
from planner.options.flags import one_line
from runtime import checkpoint
from tests.fuzz.configurations import watch
from tests.fuzz.corrupted import Bench, Hangs, judge, limited
from tests.fuzz.mutations import corrupt
from tests.fuzz.valid_files import Target, checkpoint_targets, targets


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> list[Bench]:
    """Every kind of file, ready to be corrupted."""
    folder = tmp_path_factory.mktemp("valid")
    saved = folder / "checkpoints"
    model = load_model("gpt2-124m").model_dump(mode="json")
    for iteration in (4, 8):
        partial = checkpoint.partial_folder(saved, iteration)
        partial.mkdir(parents=True)
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
            (partial / name).write_bytes(random.Random(name).randbytes(300))
        run = {"iteration": iteration, "model": model, "consumed_samples": 4 * iteration}
        checkpoint.publish(saved, iteration, run, checkpoint.file_records(partial))
    kinds = [*targets(folder, with_checkpoint=False), *checkpoint_targets(saved)]
    return [Bench(kind, tmp_path_factory.mktemp("bench")) for kind in kinds]


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_no_corrupted_file_ends_in_a_traceback_a_hang_or_a_wrong_load(
    benches: list[Bench], data: st.DataObject
) -> None:
    bench = data.draw(st.sampled_from(benches), label="file")
    name, content = bench.corrupted(data.draw(st.integers(0, 10**6), label="number"), seed=0)
    outcome, what = bench.put(name, content)
    assert outcome != "failed", f"{bench.target.name}: {name}: {what}"


def test_every_flipped_bit_of_a_checkpoint_is_found(benches: list[Bench]) -> None:
    [bench] = [bench for bench in benches if bench.target.checked]
    [weights] = [name for name in bench.target.files if name.endswith("8/__0_0.distcp")]
    valid = bench.target.files[weights]
    for bit in range(0, 8 * len(valid), 97):
        changed = bytearray(valid)
        changed[bit // 8] ^= 1 << bit % 8
        outcome, line = bench.put(weights, bytes(changed))
        assert outcome == "refused" and "__0_0.distcp" in line


def test_corruptions_are_the_same_each_time_and_differ_from_the_file(benches: list[Bench]) -> None:
    for bench in benches:
        inputs = [bench.corrupted(number, 3) for number in range(20)]
        assert inputs == [bench.corrupted(number, 3) for number in range(20)]
        assert sum(data != bench.target.files[name] for name, data in inputs) > 10
    assert corrupt(b"", random.Random(1)) is not None


def test_the_judge_tells_the_outcomes_apart() -> None:
    def fails() -> None:
        raise KeyError("layers")

    def refuses() -> None:
        raise InputError("plan x: no such file")

    def hangs() -> None:
        while True:
            pass

    assert judge(lambda: 1, 1, True) == ("same", "")
    assert judge(lambda: 2, 1, False) == ("other", "")
    assert judge(lambda: 2, 1, True)[0] == "failed"
    assert judge(refuses, 1, True) == ("refused", "plan x: no such file")
    assert judge(fails, 1, False)[1].startswith("KeyError at test_fuzz.py:")
    with pytest.raises(Hangs), limited(cpu_seconds=0.05):
        hangs()


def test_a_line_is_one_of_a_terminal_however_broken_the_file() -> None:
    long = one_line(InputError("model_type " + "x" * 9999 + " is not one of gpt2, llama"))
    assert len(long) <= LONGEST_LINE + 5 and long.endswith(" is not one of gpt2, llama")
    assert one_line(InputError("name \x1b[31m\x00\nend é")) == "name \\x1b[31m\\x00 end é"


def test_a_target_reads_back_what_it_wrote(benches: list[Bench]) -> None:
    for bench in benches:
        target: Target = bench.target
        for name in dict.fromkeys(target.corrupted):
            assert bench.put(name, target.files[name]) == ("same", ""), (target.name, name)
        assert Path(bench.folder).exists()


def test_reading_a_configuration_is_watched() -> None:
    with pytest.raises(AssertionError, match="open"), watch().during(Path("/nowhere")):
        Path("/etc/hostname").open().close()
    with pytest.raises(AssertionError, match="subprocess"), watch().during(Path("/nowhere")):
        subprocess.run(["true"], check=True)
