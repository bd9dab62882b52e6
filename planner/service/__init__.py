"""Questions as records, and their answers: what the command line, a page and programs share."""
