"""Hugging Face's trainer, trainers built on it, accelerate and DeepSpeed: configurations read and written."""
