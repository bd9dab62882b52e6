"""One rank with a layout of several ranks: `python -m benchmarks.gpu_kinds.alone FIELD=VALUE,... FLAGS`.

It is `runtime.pretrain` of the flags, with the given fields of its layout. Plans of one rank never have ZeRO,
as there are no other ranks; here a single rank runs the hooks, collectives and shards of ZeRO.
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
    """Train with the flags of the command line."""
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
