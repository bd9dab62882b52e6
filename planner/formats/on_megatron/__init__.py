"""Software whose configurations have other names for Megatron-LM's flags; they are read as those flags."""
