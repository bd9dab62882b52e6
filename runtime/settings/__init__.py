"""What a training job is told: its flags, what they rule out, and what is refused before it starts."""
