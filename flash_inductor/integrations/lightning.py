"""Lightning: a callback that switches the plugin on while a Trainer runs, and says at the end what was replaced.

from flash_inductor.integrations.lightning import FlashInductor
trainer = lightning.Trainer(callbacks=[FlashInductor()])
trainer.fit(torch.compile(model), data)
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ..matching.install import enabled
from ..report import Explanation, collect

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[no-redef]


class FlashInductor(Callback):
    """Rewrites the attention of what is compiled while ``fit``, ``validate``, ``test`` or ``predict`` runs.

    Args:
        report: print the attention sites at the end, in the first process only.
        options: ``include`` and ``exclude`` of :func:`flash_inductor.enable`.

    Attributes:
        explanation: the sites of the last run, once it has ended.
    """

    def __init__(self, *, report: bool = True, **options: Any) -> None:
        super().__init__()
        self.report = report
        self.options = options
        self.explanation: Explanation | None = None
        self._running = ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by the Trainer at the start."""
        self._running.close()
        self._running.enter_context(enabled(**self.options))
        self._sites = self._running.enter_context(collect())

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by the Trainer at the end."""
        self._running.close()
        self.explanation = Explanation(tuple(self._sites))
        if self.report and trainer.is_global_zero:
            print(self.explanation)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Called by the Trainer in place of ``teardown`` when it fails."""
        self._running.close()
