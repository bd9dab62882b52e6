"""Which of the layouts that fit are best, and why."""
