"""A reader of shell scripts: words, variables, conditions and commands, without running anything."""
