"""Days, money and failures of a whole run, and how many devices it takes."""
