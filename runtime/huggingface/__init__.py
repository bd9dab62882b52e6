"""Hugging Face models: names of their tensors, their files and their config.json."""
