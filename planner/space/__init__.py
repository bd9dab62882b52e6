"""The layouts that are legal, and the rules that remove the others."""
