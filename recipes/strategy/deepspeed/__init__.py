"""DeepSpeed ZeRO 1 to 3; the only package that touches DeepSpeed's private attributes."""
