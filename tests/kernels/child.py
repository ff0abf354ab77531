"""Runs a script of cases in a process of its own: TRITON_INTERPRET must be set before triton is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def interpret(script: str) -> dict[str, str]:
    """The JSON object that a script beside this file prints last: case name -> "" or what went wrong."""
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    path = Path(__file__).with_name(script)
    child = subprocess.run([sys.executable, str(path)], env=environ, capture_output=True, text=True, timeout=500)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])
