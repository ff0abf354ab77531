"""The passes get in whatever is imported first."""

import subprocess
import sys

import pytest

CHECK = """
from torch._inductor import config
from flash_inductor.matching.fusion_pass import FUSION, KEY
assert KEY in config.post_grad_custom_pre_pass if isinstance(config.post_grad_custom_pre_pass, tuple) \
    else config.post_grad_custom_pre_pass is KEY
flash_inductor.enable()
now = config.pre_grad_custom_pass
assert FUSION in now if isinstance(now, tuple) else now is FUSION
"""


@pytest.mark.parametrize(
    "first",
    [
        "import flash_inductor",
        "import flash_inductor, torch; flash_inductor.explain(lambda x: x + 1, torch.ones(1))",
        "import flash_inductor.matching.fusion_pass, flash_inductor",
        "import torch._inductor.config, flash_inductor",
    ],
)
def test_passes_are_installed_and_nothing_is_logged(first: str) -> None:
    done = subprocess.run([sys.executable, "-c", first + "\n" + CHECK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "flash_inductor" not in done.stderr, done.stderr
