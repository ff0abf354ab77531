"""Measures attention: problems, implementations by name, checks against float64, and fair timing."""
