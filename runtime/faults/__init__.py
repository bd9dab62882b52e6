"""What a run does when ranks die, hang or lag, steps go wrong, or the machine is about to go away."""
