"""Figures in the README against the printed results of its commands."""

from __future__ import annotations

import re

from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")

RESULTS = ROOT / "benchmarks" / "results"


def test_errors_of_unseen_sources_are_those_of_the_command() -> None:
    printed = (RESULTS / "unseen_sources.txt").read_text(encoding="utf-8")
    rows = re.findall(r"^\S+ +(\d+) +([\d.]+) +([\d.]+) +[\d.]+ +-?[\d.]+ +([\d.]+) ", printed, re.MULTILINE)
    known = {(n, median, mean, round(float(share))) for n, median, mean, share in rows}
    told = re.findall(r"\| (\d+) \| ([\d.]+) % \| ([\d.]+) % \| (\d+) % \|$", README, re.MULTILINE)
    assert len(told) > 5
    assert {(n, median, mean, int(share)) for n, median, mean, share in told} <= known
    # The two pages give the same sentence.
    (summary,) = re.findall(
        r"Median over (\d+) sources: of the median error ([\d.]+) %, of the mean error ([\d.]+) %", printed
    )
    words = " ".join(README.split())
    assert f"Over {summary[0]} sources the median of the median error is {summary[1]} %" in words
    assert f"of the mean error {summary[2]} %" in words


def test_measured_peaks_are_those_of_the_command() -> None:
    printed = (RESULTS / "memory_h100.txt").read_text(encoding="utf-8")
    (rows,) = re.findall(r"^PyTorch \S+, (\d+) rows", printed, re.MULTILINE)
    told = dict(re.findall(r"^(estimated|traced): median [\d.]+%, at most ([\d.]+)%$", printed, re.MULTILINE))
    words = " ".join(README.split())
    (estimated, traced, peaks) = re.findall(
        r"within ([\d.]+) %, and dry runs within ([\d.]+) %, of all (\d+) peaks", words
    )[0]
    assert peaks == rows
    assert float(told["estimated"]) <= float(estimated) and float(told["traced"]) <= float(traced)


def test_errors_of_memory_are_those_of_the_command() -> None:
    printed = (RESULTS / "unseen_memory.txt").read_text(encoding="utf-8")
    ((sources, median),) = re.findall(
        r"Median over (\d+) sources with peaks: of the median error ([\d.]+) %", printed
    )
    ((precision, recall),) = re.findall(r"precision ([\d.]+), recall ([\d.]+)\.$", printed, re.MULTILINE)
    words = " ".join(README.split())
    assert f"median error is {median} %, median over {sources} sources" in words
    assert f"{100 * float(precision):.1f} % ran, and of those that ran {100 * float(recall):.1f} % " in words
