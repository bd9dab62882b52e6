"""The command line of the planner: typer commands and rich tables, without logic of their own."""
