"""Settings of a training job: its flags, rules against layouts, and refused values."""
