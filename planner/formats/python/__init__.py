"""Python files read without running them: functions that build a configuration."""
