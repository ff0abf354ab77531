"""Several graph passes as one, for torch < 2.13, whose config takes a single pass."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

GraphPass = CustomGraphPass
_InferenceAware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)  # since 2.12


class PassChain(_InferenceAware or CustomGraphPass):  # type: ignore[misc]
    """Runs its passes in order.  Its uuid is None (the caches are bypassed) if one of them has none, as without us."""

    def __init__(self, passes: tuple[Any, ...]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        for p in self.passes:
            if _InferenceAware is not None and isinstance(p, _InferenceAware):
                p(graph, is_inference)
            else:
                p(graph)

    def uuid(self) -> Any | None:
        uuids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes)
        return None if None in uuids else uuids

    def __reduce__(self) -> Any:
        # torch 2.11 pickles the pass itself into the cache key.  A neighbour that can't be pickled still bypasses.
        return tuple, (self.passes,)

    def __deepcopy__(self, memo: dict[int, Any]) -> PassChain:
        return self
