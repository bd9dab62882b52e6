"""Facts of public files are compared with what is read, and changes of lines that decide them are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import public_configs_fuzz
from benchmarks.public_configs import FIELDS, Job, by_field, by_framework, complaints, jobs, judged
from benchmarks.public_configs_fuzz import outcome, trials

SCRIPT = (
    "TP=2\nMBS=4\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 \\\n"
    "  --num-attention-heads 8 \\\n  --seq-length 1024 \\\n  --max-position-embeddings 2048 \\\n"
    "  --micro-batch-size $MBS \\\n  --global-batch-size 64 \\\n  --tensor-model-parallel-size $TP \\\n"
    "  --bf16\n"
)
FACTS: dict[str, object] = {
    **dict.fromkeys(("pp", "vpp", "cp", "ep"), 1),
    "framework": "megatron",
    "tp": 2,
    "dp": 4,
    "mbs": 4,
    "gbs": 64,
    "seq": 1024,
    "precision": "bf16",
    "recompute": "none",
    "adapters": "none",
    "parameters": 8 * 12 * 512**2 + (50257 + 2048) * 512,
}


def _job(folder: Path, text: str = SCRIPT) -> Job:
    (folder / "owner" / "name").mkdir(parents=True, exist_ok=True)
    (folder / "owner" / "name" / "job.sh").write_text(text)
    return Job("owner/name", "0123456", "job.sh", (), {"device": "a100-80g"}, FACTS)


def test_the_list_is_of_many_files_and_repositories_with_facts() -> None:
    listed = list(jobs())
    assert len(listed) >= 150 and len({job.repository for job in listed}) >= 50
    assert all(job.commit and {*job.facts} <= {*FIELDS} for job in listed)
    assert sum(len(job.facts) for job in listed) > 10 * len(listed)


def test_facts_are_right_not_known_or_wrong(tmp_path: Path) -> None:
    right = judged(_job(tmp_path), tmp_path)
    assert right.is_known and {field.outcome for field in right.fields} == {"right"}
    assert not [*complaints(right, tmp_path)]

    other = judged(replace(right.job, facts={**FACTS, "tp": 4, "parameters": 1e9}), tmp_path)
    assert {field.name for field in other.fields if field.outcome == "wrong"} == {"tp", "parameters"}
    assert [line for line in complaints(other, tmp_path) if "tp is 4, read as 2" in line]

    unknown = judged(_job(tmp_path, SCRIPT.replace("TP=2\n", "TP=$(nproc)\n")), tmp_path)
    assert not unknown.is_known
    outcomes = {field.name: field.outcome for field in unknown.fields}
    assert (outcomes["tp"], outcomes["framework"], outcomes["seq"]) == ("not known", "right", "right")

    rows = [right, other, unknown]
    assert by_framework(rows)[-1][:3] == ["all", "3", "1"]
    assert ["tp", "1", "1", "1"] in by_field(rows)


def test_refused_software_is_compared_by_its_name(tmp_path: Path) -> None:
    job = _job(tmp_path, "deepspeed --module openrlhf.cli.train_sft --train.batch_size 2")
    refused = judged(replace(job, facts={**FACTS, "framework": "OpenRLHF"}), tmp_path)
    assert [field.outcome for field in refused.fields[:2]] == ["right", "not known"]
    assert next(complaints(refused, tmp_path)).startswith("refused: owner/name job.sh: ")


def test_lines_that_decide_are_removed_and_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job(tmp_path)
    found = {(trial.field, trial.change): trial for trial in trials(job, tmp_path)}
    assert {field for field, _ in found} == {"tp", "mbs", "gbs", "seq", "precision"}
    assert found["tp", "removed"].line == 0 and found["gbs", "changed"].text == "  --global-batch-size 128 \\"
    became = {key: outcome(trial, tmp_path).partition(":")[0] for key, trial in found.items()}
    assert became["tp", "changed"] == became["seq", "changed"] == "the new value"
    assert became["tp", "unreadable"] == became["mbs", "unreadable"] == "not known"
    assert became["precision", "removed"] == "a documented default"
    assert "fault" not in became.values()

    # A reader that does not look at the line.
    whole = public_configs_fuzz._read([tmp_path / "owner/name/job.sh"], {})
    monkeypatch.setattr(public_configs_fuzz, "_read", lambda files, given: whole)
    for key in (("tp", "removed"), ("tp", "changed"), ("mbs", "unreadable")):
        assert outcome(found[key], tmp_path).startswith("fault: "), key
