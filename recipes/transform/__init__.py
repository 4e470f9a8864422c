"""What is made of samples before a model sees them, one file per kind of sample; chosen by conf/transform."""
