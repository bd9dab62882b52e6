"""Days, money and failures of a whole run, and the recommended number of devices."""
