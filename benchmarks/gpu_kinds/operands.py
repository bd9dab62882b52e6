"""Rules of CUDA's kernels for operands, checked without a GPU: `python -m benchmarks.gpu_kinds.operands
[KIND]`.

The layers of each kind are compiled for a faked device, and the grouped and scaled products of their graphs
lowered for it. Prints the products of each kind that break a rule of their kernel; exit code 1 if one does.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_kinds.attempts import Machine
from benchmarks.gpu_kinds.inputs import write_inputs
from benchmarks.gpu_kinds.kinds import chosen, read_kinds
from benchmarks.gpu_kinds.plans import plans
from runtime.dryrun.run import trace
from tests.support.gpu_lowering import lowered_products


def main() -> int:
    """Check the kinds whose names contain an argument, or all."""
    train, kinds = read_kinds()
    seen, faults = set(), 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        machine = Machine(work, work, write_inputs(work / "inputs"), train, on_gpu=True, threads=1)
        for kind in chosen(kinds, sys.argv[1:]):
            for plan in plans(kind, machine):
                job = plan.model.model_dump_json(), plan.layout.model_dump_json()
                if job in seen:
                    continue
                seen.add(job)
                with lowered_products() as found:
                    trace(plan.model, plan.layout, compiled=True)
                broken = {product: product.fault for product in found if product.fault}
                faults += len(broken)
                print(f"{kind.name}: {len(found)} grouped or scaled products, {len(broken)} break a rule")
                for product, fault in broken.items():
                    print(f"  {fault}: {product}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
