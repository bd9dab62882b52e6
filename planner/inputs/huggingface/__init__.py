"""Models from the `config.json` of Hugging Face: which keys mean what, by model type."""
