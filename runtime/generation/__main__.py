"""`torchrun -m runtime.generation`: the ranks of `planner generate`."""

from __future__ import annotations

from runtime.generation.command import run_rank
from runtime.generation.generate_options import GenerateOptions
from runtime.launch.rank_command import run_rank_command

if __name__ == "__main__":
    run_rank_command("runtime.generation", GenerateOptions, run_rank)
