"""Update rules for the weights; they work on shards and give the same result under every layout."""
