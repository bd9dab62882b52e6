"""Facts in configuration files of all software: keys, flags, launch commands with their lines, and the
job."""
