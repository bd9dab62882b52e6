"""nanotron: configurations read and written."""
