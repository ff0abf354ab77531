"""Find attention in what torch.compile compiles and run it as flash attention.

    import flash_inductor
    flash_inductor.enable()
    model = torch.compile(model)

Importing the package registers the ``flashbwd`` ops and a pass that puts the package's sources into Inductor's cache
keys.  It rewrites nothing before :func:`enable` and does not import torch._inductor.
Where transformers is imported too, ``attn_implementation="flash_inductor"`` is known to it.
"""

from . import ops
from ._compat import hooks as _hooks
from .backend import flash_inductor as _backend
from .config import Config, get_config, override, set_config
from .explain import explain, report
from .functional import attention
from .matching.install import (
    compose,
    disable,
    enable,
    enabled,
    install_when_inductor_is_imported,
    is_enabled,
)
from .report import Explanation, Site
from .spec import AttentionSpec, MaskSpec

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "Config",
    "Explanation",
    "MaskSpec",
    "Site",
    "__version__",
    "attention",
    "compose",
    "disable",
    "enable",
    "enabled",
    "explain",
    "get_config",
    "is_enabled",
    "ops",
    "override",
    "report",
    "set_config",
]


def _register_with_transformers() -> None:
    from .integrations.transformers import register

    register()


install_when_inductor_is_imported()
_hooks.when_imported(_hooks.BACKEND_REGISTRY, lambda: _hooks.register_backend("flash_inductor", _backend))
_hooks.when_imported("transformers.modeling_utils", _register_with_transformers)
if get_config().enable:
    enable()
