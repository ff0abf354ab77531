"""The command line: ``flash-inductor COMMAND``, the same as ``python -m flash_inductor COMMAND``."""

from .main import main

__all__ = ["main"]
