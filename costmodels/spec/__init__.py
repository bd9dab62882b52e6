"""The vocabulary of a price: models, devices, engines and layouts, and the estimates of a layout."""
