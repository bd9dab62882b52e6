"""What a shell makes of a script: words, variables, conditions and commands, without running it."""
