"""Documents as rows: `data=documents`."""
