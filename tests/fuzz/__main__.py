"""`python -m tests.fuzz`: corrupted and hostile files, and how reading them ends."""

from planner.options.flags import run
from tests.fuzz.corrupted import app

if __name__ == "__main__":
    run(app, "tests.fuzz")
