"""Which C++ compiler Inductor would call."""

from __future__ import annotations

import os
import shutil


def cpp_compiler() -> str | None:
    """Its command, or None where Inductor finds none."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return str(get_cpp_compiler())
    except (ImportError, AttributeError):  # moved: what Inductor's documentation says it calls
        return shutil.which(os.environ.get("CXX", "g++"))
    except Exception:  # InvalidCxxCompiler, whatever its place
        return None
