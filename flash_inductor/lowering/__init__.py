"""Inductor lowerings of ``flashbwd::attn`` and ``flashbwd::attn_backward`` to Triton templates.

Importing this registers them.  It imports Inductor (seconds), so whoever switches the package on imports it just
before the first graph is lowered.  On a torch whose private names moved, nothing is registered and Inductor calls the
ops as extern kernels, as with ``Config.lowering == "extern"``.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

try:
    from . import backward, forward  # noqa: F401
except (ImportError, AttributeError, TypeError) as error:
    log.warning("attention runs as extern kernels instead of Inductor templates: %s: %s", type(error).__name__, error)
    registered = False
else:
    registered = True
