"""What files say and where it stands, for all software: keys, flags, launches, and what a job is then."""
