"""Each test starts with the switch off, and an error in the matcher fails it; processes it starts share caches."""

from integration.conftest import clean_slate, run_python

__all__ = ["clean_slate", "run_python"]
