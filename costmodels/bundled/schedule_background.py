"""What is there at a pass of a stage besides the pass: other micro batches, and the rank's other stages."""

from __future__ import annotations

import numpy as np

from costmodels.bundled.moments import Count, Moment
from costmodels.bundled.schedule_setting import Rows, Setting
from costmodels.bundled.stage_sums import Terms, value
from costmodels.spec.table import Floats


def background(setting: Setting, fixed: Terms) -> Moment:
    """What is there besides the own micro batch, and the parameters and gradients of the own stage, in each
    state: [states, 1].

    Args:
        fixed: what each rank of the table holds from the start of the step to its end, [n, pipeline].
    """
    rows, stage = setting.rows, setting.stage
    counts = rows.columns
    held, waiting = counts["held"], counts["waiting"]
    under_way = held + waiting
    converts, wraps = setting.converts, setting.wraps
    # Without FSDP2, what is reduced stays as it is.
    summed = np.where(converts, counts["summed"], counts["either"]) + counts["reduced"] * ~wraps
    others = (
        (summed, "accumulated"),
        (counts["fresh"] * converts, "fresh"),
        (counts["reduced"] * wraps, "gradients"),
    )
    coming = counts["coming"] * wraps
    gathered = counts["gathered"] * wraps
    kept = gathered - counts["freed"] * setting.frees
    inner = ~setting.first * waiting

    def total(each: Floats) -> Floats:
        result: Floats = each.sum(axis=1, keepdims=True)
        return result

    terms = [(_of_states(count, rows), each.take(rows.row)) for count, each in fixed]
    for kind, layers, top in zip(stage.kinds, setting.layers, setting.tops(), strict=True):
        terms.append((total(under_way * layers), kind.unit.kept))
        if "waits" in kind.unit.held:
            above = top * ~setting.last
            terms.append((total(inner * (layers - above)), kind.unit.waits_net))
            terms.append((total(inner * above), kind.unit.top_waits_net))
        for count, what in (*others, (kept, "gathered")):
            terms.append((total(count * layers), value(kind, what)))
        for group in (kind.group, kind.experts):
            if group is not None:
                terms.append((total(coming * layers), group.buffer))
    for where, (_, group), unit in zip(
        (setting.first, setting.last), stage.ends, (stage.first, stage.last), strict=True
    ):
        terms.append((total(under_way * where), unit.kept))
        terms.append((total(coming * where), group.buffer))
        for count, what in (*others, (gathered, "gathered")):
            terms.append((total(count * where), getattr(group, what)))
    if "waits" in stage.last.held:
        terms.append((total(inner * setting.last), stage.last.waits_net))
    terms.append((total(held * setting.last), stage.logits))
    messages = total(counts["returned"]) + (counts["local"] + counts["sent"])[:, None]
    terms.append((messages, stage.message))
    inputs = counts["arrived"] + under_way * setting.local_after - under_way * setting.local_before
    terms.append((total(inputs), stage.saved))
    return Moment("background", terms)


def _of_states(count: Count, rows: Rows) -> Count:
    """A count of each rank of a table, in each state."""
    if not isinstance(count, np.ndarray) or count.ndim == 0:
        return count
    one_row, one_rank = len(count) == 1, count.shape[1] == 1
    return count[rows.row * (not one_row), rows.rank * (not one_rank)][:, None]
