"""Settings of a training job: its flags, the layouts that they rule out, and values that are refused."""
