"""Several sources in one stream, by weight: `data=mixture`."""
