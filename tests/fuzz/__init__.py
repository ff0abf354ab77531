"""Differential fuzzing.

``FUZZ_EXAMPLES=3000 python -m pytest tests/fuzz --timeout 0`` draws that many new examples."""
