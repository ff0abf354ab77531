"""Runs all cases, each in a process of its own, so that a crash of one doesn't end the run.

    python tests/cases/run.py                          # every case and dtype through Inductor with the plugin on
    python tests/cases/run.py --device cuda -j 4       # on a GPU
    python tests/cases/run.py --mode fast --only mask  # the pass and AOTAutograd only
    python tests/cases/run.py --mode stock             # torch.compile without the plugin; --mode eager checks the cases

The status is 1 if a case failed whose fault isn't stock's in that mode.  Inductor's cache is new unless
TORCHINDUCTOR_CACHE_DIR is set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

MODES = ("compile", "fast", "stock", "eager")
RESULT = "RESULT "


def run_here(name: str, dtype: str, mode: str, device: str) -> dict[str, Any]:
    from cases import CASES
    from cases.modes import run
    from flash_inductor.report import collect

    case = next(c for c in CASES if c.name == name)
    start, message = time.time(), ""
    with collect() as sites:
        try:
            run(case, dtype, mode, device)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:400]
    return {
        "name": name, "dtype": dtype, "ok": not message, "message": message, "seconds": round(time.time() - start, 1),
        "replaced": sum(s.replaced for s in sites), "sites": len(sites),
    }  # fmt: skip


def run_child(name: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", f"{name}/{dtype}", "--mode", args.mode, "--device", args.device]
    failed = {"name": name, "dtype": dtype, "ok": False, "seconds": args.timeout, "replaced": 0, "sites": 0}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {**failed, "message": "timeout"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if lines:
        return json.loads(lines[-1].removeprefix(RESULT))
    return {**failed, "message": f"the process died with status {done.returncode}: {done.stderr[-300:]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="compile")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", help="parts of names")
    parser.add_argument("-j", "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--heavy", action="store_true", help="also cases that need gigabytes")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one case")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(RESULT + json.dumps(run_here(*args.child.split("/"), args.mode, args.device)), flush=True)
        os._exit(0)  # threads that a case left behind can't hold it up

    from cases import CASES

    chosen = [c for c in CASES if not args.only or any(part in c.name for part in args.only)]
    todo = [(c, dtype) for c in chosen if args.heavy or not c.heavy for dtype in c.dtypes]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(args.jobs) as pool:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        for (case, _), row in zip(todo, pool.map(lambda x: run_child(x[0].name, x[1], args), todo), strict=True):
            reason = case.stock.get("compile" if args.mode == "stock" else args.mode)
            row["word"] = "ok" if row["ok"] else "STOCK" if reason and args.mode in ("stock", "eager") else "FAIL"
            rows.append(row)
            sites = f"{row['replaced']}/{row['sites']} replaced" if row["sites"] else ""
            print(
                f"{row['word']:5} {row['name']}/{row['dtype']} {row['seconds']} s {sites} {row['message']}", flush=True
            )
    failed = sum(row["word"] == "FAIL" for row in rows)
    print(f"{len(rows)} runs, {sum(row['ok'] for row in rows)} right, {failed} failed")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
