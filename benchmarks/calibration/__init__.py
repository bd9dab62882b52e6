"""Published measurements as inputs of the cost model: rows of CSV files, errors, and fits of constants."""
