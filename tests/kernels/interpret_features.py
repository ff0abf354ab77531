"""The cases of feature_cases through the Triton interpreter; prints one JSON object, as interpreter_cases does."""

from __future__ import annotations

import json
import traceback
from dataclasses import replace

import torch
from feature_cases import CASES, Case, run
from interpreter_cases import patch_bf16_dot


def main() -> None:
    from flash_inductor.kernels.configs import Config

    torch.set_num_threads(1)
    patch_bf16_dot()
    # Tiles that aren't square, so that a mixed-up pair of names can't pass.
    tiles = {
        "fwd": Config(64, 32, 4, 1),
        "dq": Config(64, 32, 4, 1),
        "dkdv": Config(32, 64, 4, 1),
        "dbias": Config(32, 64, 4, 1),
    }
    results = {}
    for name, case in CASES.items():
        try:
            run(case, **tiles)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    results["control"] = _control(CASES["dropout"])
    print(json.dumps(results))


def _control(case: Case) -> str:
    """The error message of a run whose reference drops other pairs than the kernels: it must not be empty."""
    original = Case.reference
    Case.reference = lambda self, *args: original(replace(self, dropout=self.dropout + 0.01), *args)  # type: ignore[method-assign]
    try:
        run(case)
    except AssertionError as e:
        return str(e)
    finally:
        Case.reference = original  # type: ignore[method-assign]
    return ""


if __name__ == "__main__":
    main()
