"""Name what slows a run down: data, synchronisation, a slow rank, the host."""
