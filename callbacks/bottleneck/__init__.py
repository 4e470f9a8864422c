"""Report what slows a run down: data loading, gradient synchronization, a slow rank or small micro-batches."""
