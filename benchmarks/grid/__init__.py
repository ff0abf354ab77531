"""What benchmarks/attention.py is made of: cases, implementations, checks, timing, summaries."""
