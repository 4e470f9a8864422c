"""Show progress: a live bar on a terminal, with a chart in a notebook, lines elsewhere."""
