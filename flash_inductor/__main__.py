"""``python -m flash_inductor``: the command line, see :mod:`flash_inductor.cli`."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
