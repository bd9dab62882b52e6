"""Models from the `config.json` of Hugging Face: the meaning of keys, by model type."""
