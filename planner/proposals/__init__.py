"""What would fit where nothing does: the smallest change of each kind, searched and priced."""
