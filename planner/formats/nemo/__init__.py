"""NeMo and Megatron-Bridge: files, recipes and overrides read; files written."""
