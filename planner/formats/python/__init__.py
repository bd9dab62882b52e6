"""What Python files say without running them: functions that build a configuration."""
