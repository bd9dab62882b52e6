"""What one layer, the embedding and the head do: sizes, operators, and the state of their parameters."""
