"""Fine-tuning data: conversations and prompts with answers, tokenized once and packed into rows."""
