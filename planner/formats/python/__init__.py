"""Reading of functions in Python files that build a configuration, without running them."""
