"""Questions and answers as records, shared by the command line, the web page and programs."""
