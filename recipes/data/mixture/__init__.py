"""Weighted mixture of several data sources in one stream: `data=mixture`."""
