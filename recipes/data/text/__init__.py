"""Text pipeline: text files -> token cache -> token sequences."""
