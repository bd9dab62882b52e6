"""torchtitan: configurations read and written."""
