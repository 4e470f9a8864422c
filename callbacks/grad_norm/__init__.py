"""Log the gradient norm, and warn when it vanishes or keeps rising."""
