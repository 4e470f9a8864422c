"""Conversations and prompts with answers: read, rendered, tokenized once, packed into rows of `seq_len` tokens."""
