"""What benchmarks/numerics.py is made of: cases, exact results with their bounds, implementations, tables."""
