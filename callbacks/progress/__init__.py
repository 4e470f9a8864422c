"""Print progress: a live bar on a terminal, lines elsewhere."""
