"""Curves as SVG, PNG and JSON."""
