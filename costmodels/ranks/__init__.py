"""Contents of pipeline ranks: their stages, on nodes of one kind or of two."""
