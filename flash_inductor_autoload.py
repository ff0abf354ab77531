"""What ``import torch`` runs of this package: nothing, unless the environment says ``FLASH_INDUCTOR_ENABLE=1``.

An entry point of the group ``torch.backends``, which torch calls at the end of its own import.  It is a module of its
own because looking into the package would import all of it.
"""

import os


def autoload() -> None:
    """Import flash_inductor, which then switches itself on, if it is asked for.  Never raises."""
    if os.environ.get("FLASH_INDUCTOR_ENABLE", "0").lower() in ("0", "false"):
        return
    try:
        import flash_inductor  # noqa: F401  (half imported already if its own import of torch led here: it goes on)
    except Exception:
        import logging

        logging.getLogger("flash_inductor").exception(
            "FLASH_INDUCTOR_ENABLE is set, but flash_inductor can't be imported"
        )
