"""The checks that experienced people make before a long run, executed on the recipe itself."""
