"""Who updates the weights: rules that work on shards and compute the same under every layout."""
