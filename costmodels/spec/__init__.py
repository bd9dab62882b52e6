"""The records of a price: models, devices, engines, layouts, and estimates."""
