"""What all tests share: GPU tests are skipped where there is no such GPU, and no test leaves compiled code to the next.

``--results=FILE`` writes a line for each test as it ends, and prints failures at once: what a run that is cut leaves.
With "=", since pytest takes a file after a space for one of its paths too, and looks there for these very options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="FILE", help="write there how each test ended, as soon as it has")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--results") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Results(config))


class Results:
    """One line for each test: how it ended, the seconds it took, its name, and why it failed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        config.getoption("--results").write_text("")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        crash: Any = getattr(report.longrepr, "reprcrash", None)
        why = crash.message.splitlines()[:1] if crash else []
        line = " ".join([report.outcome, f"{report.duration:.1f}", report.nodeid, *why])
        with self.config.getoption("--results").open("a") as file:
            file.write(line + "\n")
        if report.failed:
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    elif torch.cuda.get_device_capability()[0] != 9:
        missing["hopper"] = "needs compute capability 9.0"
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
