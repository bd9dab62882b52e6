"""Errors of the cost model against published measurements, by source."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import NamedTuple

import numpy as np

from benchmarks.calibration.measurements import Measurement
from benchmarks.calibration.memory_peaks import MEMORY_KINDS, published_peak
from benchmarks.calibration.predictions import Peaks, Predictions
from benchmarks.calibration.rank_correlation import rank_sweeps
from costmodels.dataclass import dataclass
from costmodels.spec.table import Bools, Floats

FITTED_SOURCES = (
    "nemo_megatron_bridge",
    "bundled_h100",
    "simumax_b200",
    "vtrain_single",
    "vtrain_multi",
    "aleph_layouts",
    "mosaic_llmfoundry",
    "nvidia_dgxc",
    "hf_ultrascale",
    "bigscience_176b",
)
"""The only sources to which the constants of engines.yaml are fitted."""

FIT_SHARE = 0.5
"""Share of the rows of those sources that the fit may see."""


@dataclass(frozen=True)
class OomScore:
    """Agreement of rows that fit into memory with rows that ran: shares of 0 to 1, None without a row."""

    n: int
    """Number of rows that ran out of memory; if 0, the shares are None."""
    precision_fits: float | None
    """Share of rows that ran, among rows that are predicted to fit."""
    recall_fits: float | None
    """Share of rows that are predicted to fit, among rows that ran."""


@dataclass(frozen=True)
class PeakError:
    """Errors of the peak memory in percent, over the `n` rows that published one."""

    n: int
    median_ape: float | None
    p90_ape: float | None
    mean_ape: float | None = None
    bias: float | None = None
    """Median of the errors with their signs."""
    coverage_80: float | None = None
    """Rows whose peak lies in the 80 % range of their engine (`Engine.memory_spread`), in percent."""


@dataclass(frozen=True)
class MemoryScore(PeakError):
    """Errors over all rows, each by the first of `MEMORY_KINDS` that it published, by kind and by engine."""

    kinds: Mapping[str, PeakError] = field(default_factory=dict)
    """Errors of each published kind; a row with several kinds counts in each."""
    engines: Mapping[str, PeakError] = field(default_factory=dict)
    """Errors by engine and kind, such as `megatron, device`: each row counts once, as in the total."""


@dataclass(frozen=True)
class SourceScore:
    """Errors of one source in percent; None if no row has the figure."""

    n: int
    """Number of priced rows with a step time."""
    skipped: Mapping[str, int]
    """Number of skipped rows, by reason."""
    median_ape: float | None
    mean_ape: float | None
    p90_ape: float | None
    kendall_tau: float | None
    """Mean over sweeps, -1 to 1."""
    regret: float | None
    """Mean over sweeps, in percent of the best throughput that was measured."""
    coverage_80: float | None
    """Rows whose step time lies in their 80 % range, in percent."""
    oom: OomScore
    memory: MemoryScore


def is_fit_row(measurement: Measurement) -> bool:
    """Return whether a row is in the half of the rows that fits may use.

    The answer depends only on the job, not on its publication or its place in a file, so that the same job in
    two releases is in the same half.
    """
    if measurement.source not in FITTED_SOURCES:
        return False
    layout = measurement.layouts[0]
    identity = (
        measurement.source,
        measurement.model.name,
        measurement.cluster.device.name,
        measurement.model.seq,
        measurement.cluster.world_size,
        layout.precision,
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.virtual_pipeline_parallel,
        layout.context_parallel,
        layout.micro_batch_size,
        layout.global_batch_size,
        layout.zero_stage,
        measurement.engine.attention.flash,
    )
    digest = hashlib.sha256("\n".join(map(str, identity)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64 < FIT_SHARE


def time_factors(
    measurements: Sequence[Measurement], predictions: Predictions
) -> dict[tuple[str, str], float]:
    """One factor for each engine and device: the geometric median of measured over predicted step times."""
    logs: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for measurement, predicted in zip(measurements, predictions.step_time_s, strict=True):
        if measurement.step_time_s is not None and np.isfinite(predicted):
            key = measurement.engine.name, measurement.cluster.device.name
            logs[key].append(float(np.log(measurement.step_time_s / predicted)))
    return {key: float(np.exp(np.median(logs[key]))) for key in sorted(logs)}


def score(
    measurements: Sequence[Measurement],
    predictions: Predictions,
    skipped: Mapping[tuple[str, str], int] | None = None,
) -> dict[str, SourceScore]:
    """Errors of each source, by name.

    Args:
        skipped: rows that are no measurements, by source and reason.
    """
    reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)
    rows: defaultdict[str, list[int]] = defaultdict(list)
    for (source, reason), count in (skipped or {}).items():
        reasons[source][reason] += count
    for row, measurement in enumerate(measurements):
        if row in predictions.refused:
            reasons[measurement.source][predictions.refused[row]] += 1
        else:
            rows[measurement.source].append(row)
    return {
        source: _score(measurements, predictions, rows[source], reasons[source])
        for source in sorted({*rows, *reasons})
    }


def _score(
    measurements: Sequence[Measurement], predictions: Predictions, rows: list[int], skipped: Counter[str]
) -> SourceScore:
    lived = [row for row in rows if not measurements[row].oom]
    ran = [row for row in lived if measurements[row].step_time_s is not None]
    seconds = np.array([measurements[row].step_time_s for row in ran], dtype=np.float64)
    ratio = predictions.step_time_s[ran] / seconds
    errors = 100 * np.abs(ratio - 1)
    speed = np.array([tokens_per_s_per_device(measurements[row]) for row in ran])
    taus, regrets = rank_sweeps([measurements[row].sweep for row in ran], speed, speed / ratio)
    covered = np.abs(np.log(ratio)) <= predictions.spread[ran]
    return SourceScore(
        n=len(ran),
        skipped=dict(sorted(skipped.items())),
        median_ape=_percentile(errors, 50),
        mean_ape=_mean(errors),
        p90_ape=_percentile(errors, 90),
        kendall_tau=_mean(taus),
        regret=_mean([100 * each for each in regrets]),
        coverage_80=_mean(np.where(covered, 100.0, 0.0)),
        oom=oom_score(
            predictions.fits[rows], np.array([not measurements[row].oom for row in rows], dtype=bool)
        ),
        memory=memory_score(measurements, predictions, lived),
    )


def memory_score(measurements: Sequence[Measurement], predictions: Peaks, rows: Sequence[int]) -> MemoryScore:
    """Errors of the peaks of `rows`, which did not run out of memory."""
    first: list[_Peak] = []
    kinds: defaultdict[str, list[_Peak]] = defaultdict(list)
    engines: defaultdict[str, list[_Peak]] = defaultdict(list)
    for row in rows:
        one = measurements[row]
        found = {
            kind: _Peak(float(getattr(predictions, f"{kind}_bytes")[row]) / peak, one.engine.memory_spread)
            for kind in MEMORY_KINDS
            if (peak := published_peak(one, kind))
        }
        for kind, peak_ in found.items():
            kinds[kind].append(peak_)
        for kind, peak_ in list(found.items())[:1]:
            first.append(peak_)
            engines[f"{one.engine.name}, {kind}"].append(peak_)
    by_kind = {kind: _peak_error(kinds[kind]) for kind in MEMORY_KINDS if kinds[kind]}
    by_engine = {name: _peak_error(engines[name]) for name in sorted(engines)}
    whole = _peak_error(first)
    return MemoryScore(
        **{each.name: getattr(whole, each.name) for each in fields(PeakError)},
        kinds=by_kind,
        engines=by_engine,
    )


class _Peak(NamedTuple):
    ratio: float
    """Predicted over published bytes."""
    spread: float
    """Half the width of its range, as a natural logarithm."""


def _peak_error(peaks: Sequence[_Peak]) -> PeakError:
    ratios = np.array([peak.ratio for peak in peaks])
    widths = np.array([peak.spread for peak in peaks])
    errors = 100 * np.abs(ratios - 1)
    held = np.where(np.abs(np.log(ratios)) <= widths, 100.0, 0.0)
    return PeakError(
        n=len(peaks),
        median_ape=_percentile(errors, 50),
        p90_ape=_percentile(errors, 90),
        mean_ape=_mean(errors),
        bias=_percentile(100 * (ratios - 1), 50),
        coverage_80=_mean(held) if widths.any() else None,
    )


def oom_score(fits: Bools, ran: Bools) -> OomScore:
    """Shares of rows with a correct prediction of whether they fit.

    Args:
        ran: rows that did not run out of memory.
    """
    out = int((~ran).sum())
    if not out:
        return OomScore(0, None, None)
    return OomScore(out, _mean(ran[fits]), _mean(fits[ran]))


def tokens_per_s_per_device(measurement: Measurement) -> float:
    """Throughput of a measured step; NaN if its time is not known."""
    tokens = measurement.layouts[0].global_batch_size * measurement.model.seq
    return tokens / (measurement.step_time_s or np.nan) / measurement.cluster.world_size


def _percentile(values: Floats, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _mean(values: Floats | Bools | Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
