"""A device and its engine's constants from measurements of one machine.

Single kernels give the first values of constants and their prior widths. A few whole steps show the effects
that single kernels do not: waiting of ranks for each other, launches, copies. Both are fitted in log space,
where 10 % too long counts as much as 10 % too short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from costmodels.calibration.machine_measurements import Measurements, StepTime
from costmodels.calibration.robust_fit import Knowledge, robust_fit
from costmodels.pricing import Prices, price
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster, Device, Link, MeasuredCollective, Precision
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable, shared_fields

TOLERANCE = 0.06
"""Relative error of a step that counts as noise."""

LEAST_SPREAD = 0.1
"""The least relative width of the 80 % range of a step time on a measured machine."""

SPREAD_SHARE, MORE = 0.8, 1.6
"""Quantile of the remaining errors that the range covers, and the factor by which it is wider for other
models."""

ALONE = 0.3
"""Prior width of the constants fitted to steps on an accelerator, as a share of the width on a CPU. Ranks of
a CPU share its cores, which measurements of single kernels do not show; a kernel of an accelerator has the
whole device."""

UPDATE_BYTES = 28.0
"""Bytes that Adam's update of one parameter reads and writes (`costmodels.layers.optimizer.UPDATES`)."""

BANDWIDTH = "bandwidth"
"""Name of a fitted number that is not an engine constant: the factor of all measured bandwidths of
collectives."""


class Batch(NamedTuple):
    """Steps of one model that are priced together."""

    model: ModelSpec
    table: LayoutTable
    seconds: Floats
    peaks: Floats


def fitted_device(plain: Device, engine: Engine, found: Measurements) -> Device:
    """`plain` with measured rates and fitted constants.

    Args:
        plain: the catalogue's device, for that number of ranks.
        engine: the catalogue's engine that ran the steps.
    """
    device, constants = _start(plain, engine, found)
    if not found.steps:
        return with_constants(device, engine, constants)
    return refitted_device(with_constants(device, engine, constants), engine, found.ranks, found.steps)


def refitted_device(device: Device, engine: Engine, ranks: int, steps: Sequence[StepTime]) -> Device:
    """A device whose constants fit whole steps; the fit starts from its present constants.

    Args:
        ranks: ranks of one node.
    """
    batches = batches_of(steps)
    known = _knowledge(device, engine.for_device(device), steps)
    measured = np.log(np.concatenate([batch.seconds for batch in batches]))

    def predicted(values: Mapping[str, float]) -> Floats:
        trial = _with_values(device, engine, values)
        steps_s = [prices(batch, trial, engine, ranks).step_time_s for batch in batches]
        result: Floats = np.log(np.concatenate(steps_s))
        return result

    values = robust_fit(known, lambda some: predicted(some) - measured, TOLERANCE)
    result = _with_values(device, engine, {name: float(f"{v:.4g}") for name, v in values.items()})
    missed = np.abs(predicted(values) - measured)
    base = max(LEAST_SPREAD, MORE * float(np.quantile(missed, SPREAD_SHARE)))
    spread = {"base": round(base, 3), "network": 0.1, "launch": 0.0, "bubble": 0.1}
    result = with_constants(result, engine, {"spread": spread})
    return _with_memory(result, engine, ranks, batches)


def batches_of(steps: Sequence[StepTime]) -> list[Batch]:
    """Steps in groups that one table of layouts can hold."""
    groups: dict[tuple[str, ...], list[StepTime]] = {}
    for step in steps:
        key = (step.model.model_dump_json(), *map(str, shared_fields(step.layout)))
        groups.setdefault(key, []).append(step)
    return [
        Batch(
            some[0].model,
            LayoutTable.of([step.layout for step in some]),
            np.array([step.seconds for step in some]),
            np.array([float(step.peak_bytes) for step in some]),
        )
        for some in groups.values()
    ]


def prices(batch: Batch, device: Device, engine: Engine, ranks: int) -> Prices:
    """Prices of the layouts of a batch, with simulated pipelines.

    Args:
        ranks: ranks of one node.
    """
    world = int(batch.table.layout(0).world_size)
    cluster = Cluster(
        device=device,
        world_size=world,
        devices_per_node=min(ranks, world),
        memory_bytes=device.memory_bytes,
        measured=device.collectives,
    )
    found = price(batch.model, cluster, engine, batch.table)
    return found.simulate(np.flatnonzero(~found.simulated))


def _start(plain: Device, engine: Engine, found: Measurements) -> tuple[Device, dict[str, Any]]:
    """The device with rates from its kernels, and first constants by name."""
    peak, constants = _product_constants(plain, engine.for_device(plain), found)
    rates: dict[str, Any] = {}
    if plain.kind == "cpu":
        shared = ("memory_bandwidth", "host_bandwidth", "host_memory_bandwidth")
        rates |= dict.fromkeys(shared, found.copy_bytes_per_s)
        constants["elementwise.efficiency"] = 1.0
    else:
        rates |= {"host_bandwidth": found.host_bytes_per_s} if found.host_bytes_per_s else {}
        constants["elementwise.efficiency"] = min(1.0, found.copy_bytes_per_s / plain.memory_bandwidth)
    if found.rank_bytes:
        rates["context_bytes"] = found.rank_bytes
    device = plain.model_copy(update=rates | {"peak_flops": dict(plain.peak_flops) | peak})
    bandwidth = device.memory_bandwidth * constants.get(
        "elementwise.efficiency", engine.for_device(plain).elementwise.efficiency
    )
    if found.update_s:
        constants["elementwise.update_passes"] = found.update_s * bandwidth / UPDATE_BYTES
    constants["host.layer_overhead"] = found.layer_host_s
    links, collectives = _links(plain, found)
    device = device.model_copy(update={**links, "collectives": collectives})
    constants |= _attention_constants(device, engine.for_device(plain), found)
    if plain.kind == "cpu":
        # Waits between ranks are those of collectives, which were measured.
        constants |= {"host.tensor_parallel": 1.0, "host.sequence_parallel": 1.0}
        constants["host.tensor_parallel_step"] = 0.0
    return device, constants


def _product_constants(
    plain: Device, engine: Engine, found: Measurements
) -> tuple[dict[Precision, float], dict[str, Any]]:
    """Peak FLOP/s of the measured format, and the constants of GEMMs.

    On a CPU the peak is that of the fastest GEMM, elsewhere the data sheet's.
    """
    if not found.products:
        return {}, {}
    flops = np.array([2.0 * row.m * row.k * row.n for row in found.products])
    forward = np.array([row.forward_s for row in found.products])
    backward = np.array([row.backward_s for row in found.products])
    reference = plain.peak_flops[found.precision]
    # Seconds of a GEMM and its gradients are 3 flops / rate + 3 launches: all rows in relative terms.
    total, work = forward + backward, 3.0 * flops / reference
    columns = np.stack([work / total, 3.0 / total], axis=1)
    slope, launch = np.linalg.lstsq(columns, np.ones(len(total)), rcond=None)[0]
    if launch <= 0 or slope <= 0:
        slope, launch = float(np.median(total / work)), engine.gemm.launch
    rate = reference / slope
    peak: dict[Precision, float] = {}
    if plain.kind == "cpu":
        reference = float(max(rate, (flops / forward).max(), (2 * flops / backward).max()))
        peak = {found.precision: reference}
    constants: dict[str, Any] = {"gemm.efficiency": float(np.clip(rate / reference, 0.01, 1.0))}
    constants["gemm.launch"] = float(launch)
    if plain.kind == "cpu":
        constants["gemm.wave"] = 0.0
    if engine.gemm.fp32_efficiency is not None and found.precision in ("fp32", "tf32"):
        constants["gemm.fp32_efficiency"] = constants["gemm.efficiency"]
    return peak, constants


def _attention_constants(device: Device, engine: Engine, found: Measurements) -> dict[str, Any]:
    if not found.attention:
        return {}
    peak = device.peak_flops[found.precision]
    flops = np.array([2.0 * row.batch * row.heads * row.seq**2 * row.head_dim for row in found.attention])
    forward = flops / np.array([row.forward_s for row in found.attention]) / peak
    backward = 2.5 * flops / np.array([row.backward_s for row in found.attention]) / peak
    constants = engine.attention
    rows = found.attention
    share = np.array(
        [
            (1 + constants.half_head / row.head_dim) * (1 + constants.half_seq / row.seq) / constants.scale
            for row in rows
        ]
    )
    efficiency = float(np.clip(np.median(forward * share), 0.001, 1.0))
    return {
        "attention.efficiency": efficiency,
        "attention.backward_rate": float(np.clip(np.median(backward / forward), 0.1, 4.0)),
    }


def _links(plain: Device, found: Measurements) -> tuple[dict[str, Any], tuple[MeasuredCollective, ...]]:
    """The links of the device, and its collectives: seconds of calls as latency + bytes / bandwidth."""
    groups: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for call in found.calls:
        moved = _bus_share(call.collective, call.devices) * call.message_bytes
        groups.setdefault((call.collective, call.devices, call.nodes), []).append((moved, call.seconds))
    rows = []
    for (name, devices, nodes), points in groups.items():
        moved, seconds = np.array(points).T
        bandwidth, latency = _line(moved, seconds)
        rows.append(
            MeasuredCollective.model_validate(
                {
                    "collective": name,
                    "devices": devices,
                    "nodes": nodes,
                    "bus_bandwidth": bandwidth,
                    "message_bytes": float(moved.max()),
                    "latency": latency,
                }
            )
        )
    near = [row for row in rows if row.nodes == 1 and row.devices == 2 and row.collective == "all_reduce"]
    links = {}
    if near:
        # An all-reduce of two ranks is two hops.
        link: Link = plain.intra_node
        links["intra_node"] = link.model_copy(
            update={"bandwidth": near[0].bus_bandwidth, "latency": near[0].latency / 2}
        )
    return links, tuple(rows)


def _bus_share(name: str, devices: int) -> float:
    """Bus bytes for each byte of a message, by nccl-tests' definition (PERFORMANCE.md)."""
    if name == "send":
        return 1.0
    return (2.0 if name == "all_reduce" else 1.0) * (devices - 1) / devices


def _line(moved: Floats, seconds: Floats) -> tuple[float, float]:
    """Bytes per second, and seconds of an empty call, with the least relative errors for calls of several
    sizes."""
    columns = np.stack([moved / seconds, 1.0 / seconds], axis=1)
    slope, latency = np.linalg.lstsq(columns, np.ones(len(moved)), rcond=None)[0]
    if slope <= 0:
        slope = seconds[moved.argmax()] / moved.max()
    return float(1.0 / slope), float(max(latency, 0.0))


def _knowledge(device: Device, engine: Engine, steps: Sequence[StepTime]) -> dict[str, Knowledge]:
    """Prior ranges of the constants that the measured steps depend on."""
    layouts = [step.layout for step in steps]
    host, network = engine.host, engine.network

    def some(has: Any) -> bool:
        return any(has(layout) for layout in layouts)

    shared = 1.0 if device.kind == "cpu" else ALONE
    found = {
        "gemm.efficiency": Knowledge(engine.gemm.efficiency, 0.3 * shared, 0.005, 1.0),
        "elementwise.passes": Knowledge(engine.elementwise.passes, 0.5 * shared, 0.1, 100.0),
        "attention.efficiency": Knowledge(engine.attention.efficiency, 0.4 * shared, 0.0005, 1.0),
        "host.layer_overhead": Knowledge(host.layer_overhead, 0.35, 1e-6, 1.0),
        "host.step": Knowledge(host.step or 5 * host.layer_overhead, 1.0, 1e-6, 10.0),
    }
    if some(lambda layout: layout.world_size > 1):
        late = network.collective_latency or device.intra_node.latency
        found["network.collective_latency"] = Knowledge(late, 1.0, 1e-7, 1.0)
        found[BANDWIDTH] = Knowledge(1.0, 0.6, 0.02, 50.0)
    if some(lambda layout: layout.zero_stage > 0):
        found["host.shard"] = Knowledge(host.shard or host.layer_overhead, 1.2, 1e-7, 1.0)
    if some(lambda layout: layout.pipeline_parallel > 1):
        late = network.message_latency or device.intra_node.latency
        found["network.message_latency"] = Knowledge(late, 1.2, 1e-7, 1.0)
    if device.kind == "cpu" and some(
        lambda layout: layout.pipeline_parallel > 1 and layout.schedule != "1f1b"
    ):
        late = network.meanwhile_latency or device.intra_node.latency
        found["network.meanwhile_latency"] = Knowledge(late, 1.2, 1e-7, 1.0)
    if some(lambda layout: layout.schedule in SPLIT_BACKWARD and layout.pipeline_parallel > 1):
        found["host.split_backward"] = Knowledge(host.split_backward, 0.7, 0.3, 20.0)
    if some(lambda layout: layout.tensor_parallel > 1):
        found["host.tensor_parallel"] = Knowledge(host.tensor_parallel, 0.3, 0.3, 10.0)
    if some(lambda layout: layout.sequence_parallel):
        found["host.sequence_parallel"] = Knowledge(host.sequence_parallel, 0.5, 0.3, 20.0)
    if some(lambda layout: layout.context_parallel > 1):
        late = network.context_latency or host.layer_overhead
        found["network.context_latency"] = Knowledge(late, 1.0, 1e-7, 1.0)
    if any(step.model.experts for step in steps):
        found["host.routing"] = Knowledge(host.routing or host.layer_overhead, 1.0, 1e-7, 1.0)
    if some(lambda layout: layout.expert_parallel > 1):
        late = network.dispatch_latency or host.layer_overhead
        found["network.dispatch_latency"] = Knowledge(late, 1.2, 1e-7, 1.0)
    return found


def _with_values(device: Device, engine: Engine, values: Mapping[str, float]) -> Device:
    constants = {name: value for name, value in values.items() if name != BANDWIDTH}
    factor = values.get(BANDWIDTH, 1.0)
    if factor != 1.0:
        rows = tuple(
            row.model_copy(update={"bus_bandwidth": row.bus_bandwidth * factor}) for row in device.collectives
        )
        link = device.intra_node
        near = link.model_copy(update={"bandwidth": link.bandwidth * factor})
        device = device.model_copy(update={"collectives": rows, "intra_node": near})
    return with_constants(device, engine, constants)


def with_constants(device: Device, engine: Engine, constants: Mapping[str, Any]) -> Device:
    """The device with constants of `engine`, by names such as `gemm.efficiency`, besides those it has."""
    own: dict[str, Any] = {
        group: dict(fields) for group, fields in device.constants.get(engine.name, {}).items()
    }
    for name, value in constants.items():
        group, _, field = name.partition(".")
        if field:
            own.setdefault(group, {})[field] = value
        else:
            own[group] = value
    return device.model_copy(update={"constants": {**device.constants, engine.name: own}})


def _with_memory(device: Device, engine: Engine, ranks: int, batches: Sequence[Batch]) -> Device:
    """The device with the bytes of a rank besides tensors fitted to the peaks of steps.

    This is for CPUs only, as other devices report bytes of tensors.
    """
    if device.kind != "cpu":
        return device
    known = [batch.peaks > 0 for batch in batches]

    def peaks(reserve: float) -> Floats:
        """Predicted peaks of measured steps: only tensors, and `reserve` bytes for each parameter."""
        trial = with_constants(
            device.model_copy(update={"context_bytes": 0.0}), engine, {"allocator.gathering_reserve": reserve}
        )
        found = [prices(batch, trial, engine, ranks).peak_memory_bytes for batch in batches]
        return np.concatenate([every[some] for every, some in zip(found, known, strict=True)])

    rest = np.concatenate([batch.peaks[some] for batch, some in zip(batches, known, strict=True)]) - peaks(0)
    if not len(rest):
        return device
    parameters = peaks(1.0) - peaks(0.0)
    gathers = parameters > 0
    context = float(max(0.0, np.median(rest if gathers.all() else rest[~gathers])))
    device = device.model_copy(update={"context_bytes": context})
    if not gathers.any():
        return device
    reserve = float(max(0.0, np.median((rest[gathers] - context) / parameters[gathers])))
    return with_constants(device, engine, {"allocator.gathering_reserve": float(f"{reserve:.3g}")})
