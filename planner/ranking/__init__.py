"""The ranking of layouts that fit, and the reasons for it."""
