"""Pages in a browser: a form that answers questions, and runs while they train."""
