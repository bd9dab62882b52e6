"""Every figure of the README as a command that prints it."""
