"""What is written, and where a run resumes from."""
