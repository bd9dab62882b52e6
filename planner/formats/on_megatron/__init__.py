"""Software whose configurations name Megatron-LM's flags in their own way: read as those flags."""
