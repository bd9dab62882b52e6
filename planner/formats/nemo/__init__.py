"""NeMo and Megatron-Bridge: files, recipes and overrides read, and files written."""
