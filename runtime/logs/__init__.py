"""What a run prints and writes for people and programs, which must never stop it."""
