"""A training job from its plan to its end: iterations, starting checkpoints, log lines, replanning."""
