"""One rank that splits what ranks share: `python -m benchmarks.gpu_kinds.alone FIELD=VALUE,... FLAGS`.

It is `runtime.pretrain` of the flags, with a layout whose fields are as said. No plan of one rank has ZeRO,
as there is nobody to share with; hooks, collectives and shards are those of any rank that has it.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn
from unittest.mock import patch

import yaml

from costmodels import Layout
from runtime import pretrain
from runtime.train import stages
from runtime.train.trainer import Trainer


def main() -> NoReturn:
    """Train as the command line says."""
    pairs = (pair.partition("=") for pair in sys.argv.pop(1).split(","))
    fields = {name: yaml.safe_load(value) for name, _, value in pairs}

    def trainer(spec: Any, layout: Layout, *others: Any) -> Trainer:
        # Not validated: a layout of one rank is refused such fields.
        return Trainer(spec, layout.model_copy(update=fields), *others)

    # A single process refuses jobs that run in one rank of several.
    with patch.object(pretrain, "Trainer", trainer), patch.object(stages, "check_job"):
        pretrain.main()


if __name__ == "__main__":
    main()
