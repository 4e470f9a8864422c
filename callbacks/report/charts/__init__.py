"""Curves as data for the page's script and as a PNG."""
