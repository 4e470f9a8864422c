"""Files of tokens, local or in object storage, read one after the other: `data=token_shards`."""
