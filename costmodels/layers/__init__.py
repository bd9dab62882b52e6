"""The work and the size of one layer, the embedding and the head: operators, parameters and optimizer
state."""
