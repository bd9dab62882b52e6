"""Facts that files state, for all software: keys, flags, launches, their lines, and the job that they
describe."""
