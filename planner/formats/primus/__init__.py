"""Primus: experiments that train with Megatron-LM or torchtitan, and the presets that they start from."""
