"""Text files to a token cache to sequences of tokens."""
