"""Primus: experiments that train with Megatron-LM or torchtitan, and their presets."""
