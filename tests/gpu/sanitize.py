"""Small launches of every Hopper kernel, for NVIDIA's compute-sanitizer; it is slow, so nothing here compares results.

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py

Most of the time is compilation: ``--head-dim`` lets several processes share the work, ``--few`` leaves out softcaps and
the bands that run no other code.  ``--empty`` launches two kernels that do nothing instead: what racecheck reports of
them too isn't ours.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the package beside this folder, installed or not

import sanitize_empty
import torch

from flash_inductor.ops import attn, attn_backward
from flash_inductor.testing import make_inputs

DIMS = ((64, 64), (96, 96), (128, 128), (256, 256), (192, 128))
BANDS = ({}, {"is_causal": True}, {"is_causal": True, "window_left": 70}, {"window_left": 30, "window_right": 40})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, choices=[dim for dim, _ in DIMS], help="only this one")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--empty", action="store_true", help="kernels that are split by warps and do nothing")
    args = parser.parse_args()
    if args.empty:
        for name in sanitize_empty.KERNELS:
            sanitize_empty.launch(name)
            print("ran", name, flush=True)
        return 0
    dims = [pair for pair in DIMS if args.head_dim in (None, pair[0])]
    bands, softcaps = (BANDS[1:3], (None,)) if args.few else (BANDS, (None, 20.0))
    for (dim, v_dim), band, softcap, deterministic in itertools.product(dims, bands, softcaps, (False, True)):
        torch.use_deterministic_algorithms(deterministic)
        sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 200, "kv_len": 333}
        inputs = make_inputs("bnhd", **sizes, head_dim=dim, v_head_dim=v_dim, dtype=torch.bfloat16, device="cuda")
        out, lse = attn(*inputs, **band, softcap=softcap, kernel_name="gluon")
        grad_out = torch.randn_like(out)
        kernel = "gluon" if dim == v_dim or dim > 128 else None
        attn_backward(grad_out, None, *inputs, out, lse, **band, softcap=softcap, kernel_name=kernel)
        torch.cuda.synchronize()
        print("ran", dim, v_dim, band, softcap, "deterministic" if deterministic else "", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
