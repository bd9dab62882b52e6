"""Proposals where nothing fits: the smallest change of each kind that fits, searched and priced."""
