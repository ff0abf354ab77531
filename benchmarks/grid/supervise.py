"""Child processes: several that compile at once, and one that measures and is replaced when it hangs or dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .store import Store

STARTUP = ["", "startup"]  # what a process is at before its first case
MOST_RESTARTS = 8


def tell(progress: Path, case: str, impl: str) -> None:
    """Leave word of what is running now; the file's age says for how long."""
    draft = progress.with_name(f"{progress.name}.draft")
    draft.write_text(json.dumps([case, impl]))
    draft.replace(progress)


def compile_all(command: Sequence[str], workers: int, seconds: float) -> list[str]:
    """Run ``command --share i/workers`` for each worker at once, for at most so many seconds.

    The result is the last words of those that failed; being stopped at the end is no failure.
    """
    begin = time.monotonic()
    # One compiling thread a process: there is one process a core already.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for i in range(workers):
            with (Path(folder) / str(i)).open("w") as words:
                share = [*command, "--share", f"{i}/{workers}"]
                children.append(subprocess.Popen(share, env=environment, stdout=words, stderr=subprocess.STDOUT))
        while any(child.poll() is None for child in children) and time.monotonic() - begin < seconds:
            time.sleep(0.1)
        for i, child in enumerate(children):
            if child.poll() is None:
                child.kill()
            elif child.returncode != 0:
                last = (Path(folder) / str(i)).read_text().strip().splitlines()
                failures.append(last[-1] if last else f"exit code {child.returncode}")
            child.wait()
    return failures


def watch(command: Sequence[str], reload: Callable[[], Store], progress: Path, hang: float, deadline: float) -> int:
    """Run ``command`` until it ends well, and again without what it was at each time it hangs or dies.

    ``reload`` reads the run's file as the child left it.  The result is the number of restarts.  RuntimeError if the
    child dies before its first case, or too often.
    """
    for restarts in range(MOST_RESTARTS + 1):
        tell(progress, *STARTUP)
        child = subprocess.Popen(command)
        why = _outcome(child, progress, hang, deadline)
        if why is None:
            return restarts
        case, impl = json.loads(progress.read_text())
        if [case, impl] == STARTUP:
            raise RuntimeError(f"the measuring process {why} before its first case")
        print(f"# {case}, {impl}: {why}; going on without it", flush=True)
        reload().add_broken(case, impl, why)
    raise RuntimeError(f"the measuring process was restarted {MOST_RESTARTS} times")


def _outcome(child: subprocess.Popen[Any], progress: Path, hang: float, deadline: float) -> str | None:
    """None if the child ended well or ran out of time, else how it failed."""
    while child.poll() is None:
        time.sleep(0.1)
        over_time = time.time() > deadline
        if over_time or time.time() - progress.stat().st_mtime > hang:
            child.kill()
            child.wait()
            return None if over_time else f"hung for {hang:.0f} s"
    return None if child.returncode == 0 else f"died with exit code {child.returncode}"


def own_command(script: str, argv: Sequence[str], role: str) -> list[str]:
    return [sys.executable, script, *argv, "--role", role]
