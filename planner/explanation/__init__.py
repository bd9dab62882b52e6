"""Why a plan ranks where it does, and what a change would buy."""
