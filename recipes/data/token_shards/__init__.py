"""Token files in local or object storage, streamed a few at a time: `data=token_shards`."""
