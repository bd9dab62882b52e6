"""Update rules for the weights, which work on shards and compute the same under every layout."""
