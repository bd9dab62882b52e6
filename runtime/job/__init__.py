"""A training job from its plan to its end: iterations, checkpoints it begins from, log lines, replanning."""
