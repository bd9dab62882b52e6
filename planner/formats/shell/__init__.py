"""A reader of shell scripts (words, variables, conditions and commands) that runs nothing."""
