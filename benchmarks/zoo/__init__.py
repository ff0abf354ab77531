"""Tiny, randomly initialised models of many architectures, and a detector of attention independent of the package.

Nothing is downloaded: every model is made from a config class.  A library that is missing takes only its own entries
away.  :data:`REGISTRY` holds the entries; :func:`build` makes one.
"""

from . import decoders, encoders, handwritten, libraries, more, more_encoders
from .registry import REGISTRY, Entry, build

__all__ = ["REGISTRY", "Entry", "build", "decoders", "encoders", "handwritten", "libraries", "more", "more_encoders"]
