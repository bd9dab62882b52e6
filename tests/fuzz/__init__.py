"""Wrong, corrupted and hostile input in thousands: commands that search, and tests of a few of each."""
