"""The two graph passes: one rewrites, one puts this package's sources into Inductor's cache keys.

Imported once Inductor is.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from .. import config as settings
from .._compat import hooks
from .._compat.pass_chain import GraphPass
from ..ops import tuned
from ..report import Site, count_graph, record, redirect
from . import install, stock

log = logging.getLogger("flash_inductor")
_said: set[str] = set()


def _hash_of_sources() -> str:
    """Of every file of the package: kernels, lowerings, fakes and matcher all decide what is compiled."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


SOURCES = _hash_of_sources()


class _Pass(GraphPass):
    def uuid(self) -> Any:
        return (type(self).__name__, SOURCES, repr(settings.get_config()), tuned.current().digest)

    def __reduce__(self) -> Any:
        # torch 2.11 pickles the pass itself into the cache key: the pickle must say what the uuid says.
        return tuple, (self.uuid(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Pass:
        return self  # torch 2.12 gives each thread a deep copy of the default

    def __call__(self, graph: fx.Graph) -> None:
        if not install.is_held_off():
            install.attempt(self.run, graph)

    def run(self, graph: fx.Graph) -> None:
        raise NotImplementedError


class FusionPass(_Pass):
    """Pre-grad: rewrites attention while the switch is on."""

    def uuid(self) -> Any:
        return (*super().uuid(), install.is_enabled())

    def run(self, graph: fx.Graph) -> None:
        if not install.is_enabled():
            return
        if not hooks.passes_run_before_cache_lookup():
            _warn_once(
                "attention is not rewritten: torch._inductor.config.pre_grad_pass_timing is 'late', but the rewrite "
                "has to run for cached graphs too; leave it unset or set it to 'early'"
            )
            return
        ensure_key()
        rewrite_or_leave(graph, outer=hooks.outer_module(graph))


class KeyPass(_Pass):
    """Post-grad: changes nothing.

    Neither the FX graph cache nor AOTAutograd's cache knows a custom op's lowering, fake or backward, so without this
    pass's uuid a new version of the package would be served the code of the old one.  It also runs right before the
    lowering, on a cache miss only: the time to import the lowerings.
    """

    def uuid(self) -> Any:
        return (*super().uuid(), stock.is_checked())

    def __call__(self, graph: fx.Graph) -> None:
        import_lowerings()
        super().__call__(graph)

    def run(self, graph: fx.Graph) -> None:
        if install.is_enabled() and FUSION not in hooks.passes_in_force(hooks.PRE_GRAD):
            _warn_once(
                "attention is not rewritten: torch._inductor.config.pre_grad_custom_pass was set after "
                "flash_inductor.enable(); set it to flash_inductor.compose(your_pass), or set it before"
            )


FUSION = FusionPass()
KEY = KeyPass()


def import_lowerings() -> None:
    """Register the op's lowerings.  Without them the op is called as it is: slower to launch, but right."""
    try:
        from .. import lowering  # noqa: F401 - importing registers
    except Exception as error:
        if settings.get_config().strict:
            raise
        _warn_once(f"no lowering to templates with this torch, the kernels are called instead: {error}", error)


def ensure_key() -> None:
    """Put the key pass back where somebody has set other post-grad passes after import."""
    if KEY not in hooks.passes_in_force(hooks.POST_GRAD):
        hooks.add_pass(hooks.POST_GRAD, KEY)


def rewrite_or_leave(graph: fx.Graph, *, apply: bool = True, outer: torch.fx.GraphModule | None = None) -> list[Site]:
    """``rewrite_graph``, except that an error in it leaves the graph as it was and is logged, not raised.

    Raises what the matcher raises if ``Config.strict`` is set.
    """
    if settings.get_config().strict:
        from .rewrite import rewrite_graph

        with redirect() as sites:
            rewrite_graph(graph, apply=apply, outer=outer)
            graph.lint()
    else:
        backup = _Backup(graph)
        try:
            from .rewrite import rewrite_graph  # in here: it imports private names of torch

            with redirect() as sites:
                rewrite_graph(graph, apply=apply, outer=outer)
                graph.lint()
        except Exception as error:
            backup.restore()
            _warn_once(
                f"internal error, the graph is compiled as it was written: {type(error).__name__}: {error}; "
                "please report this with the traceback below (FLASH_INDUCTOR_STRICT=1 raises it)",
                error,
            )
            return []
    for site in sites:
        record(site)
    if apply:
        count_graph()
        _log_sites(sites)
    return sites


def _log_sites(sites: list[Site]) -> None:
    replaced = sum(site.replaced for site in sites)
    if sites:
        log.info("[%s] %d of %d attention sites replaced", hooks.compile_id(), replaced, len(sites))
    else:
        log.info("[%s] no attention found", hooks.compile_id())
    level = logging.INFO if settings.get_config().log_sites else logging.DEBUG
    for site in sites if log.isEnabledFor(level) else ():
        log.log(level, "[%s] %s", hooks.compile_id(), site.describe())


def _warn_once(message: str, error: BaseException | None = None) -> None:
    if message not in _said:
        _said.add(message)
        log.warning(message, exc_info=error)


class _Backup:
    """What a graph's nodes were, to make them again.

    Placeholders stay the same objects: Dynamo sets attributes on them.  Only references are kept, and no second graph:
    making its nodes was a quarter of the pass's time.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = [(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta)) for n in graph.nodes]

    def restore(self) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node.op != "placeholder":
                self.graph.erase_node(node)
        made: dict[fx.Node, fx.Node] = {}

        def again(node: fx.Node) -> fx.Node:
            return made.get(node, node)

        for node, op, target, args, kwargs, name, kind, meta in self.nodes:
            if op == "placeholder":
                continue
            made[node] = self.graph.create_node(
                op, target, cast(Any, fx.map_arg(args, again)), cast(Any, fx.map_arg(kwargs, again)), name, kind
            )
            made[node].meta = meta


def graphs_of(gm: torch.fx.GraphModule) -> list[tuple[fx.Graph, torch.fx.GraphModule | None]]:
    """The graphs of the bodies of higher-order ops (checkpoint, cond, ...), then the graph itself.

    With each body's graph the module that runs it.
    """
    return [(body.graph, outer) for body, outer in hooks.subgraphs(gm)] + [(gm.graph, None)]


install.sync()
stock.install_check()
