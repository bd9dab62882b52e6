"""Hugging Face's trainer and what is built on it, accelerate and DeepSpeed: read and written."""
