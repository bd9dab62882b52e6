"""Pages in a browser: a form for questions with answers, and a view of running jobs."""
