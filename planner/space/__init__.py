"""The legal layouts, and the rules that remove the others."""
