"""Models whose tensors, sequences or layers several ranks divide: what each rank computes, and what ranks exchange."""
