"""Compare several runs on one page."""
