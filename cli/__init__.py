"""How a person talks to the planner: typer commands and rich tables, no logic of their own."""
