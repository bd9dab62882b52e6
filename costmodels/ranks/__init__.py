"""What pipeline ranks hold: their stages, on nodes of one kind or of two."""
