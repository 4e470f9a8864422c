"""One optimizer a file; each takes a model and gives a torch optimizer with its decay groups."""
