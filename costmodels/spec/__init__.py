"""What is priced: models, devices, engines and layouts, and what a price says."""
