"""Which symbolic sizes a compilation may turn into numbers."""

from __future__ import annotations

import torch


def may_become_constant(size: torch.SymInt) -> bool:
    """Whether a guard may pin the size: it has a value in this compilation, and the user asked for no dynamic one.

    ``mark_dynamic`` makes an error of such a guard, after the compilation.  What was asked for lies beside Dynamo's
    fake inputs (``ShapeEnv.tracked_fakes``, torch 2.11 to 2.15); where it can't be read, nothing is pinned.
    """
    node = size.node
    env, symbols = node.shape_env, node.expr.free_symbols
    if env is None or not node.has_hint():
        return False
    tracked = getattr(env, "tracked_fakes", None)
    if not tracked:
        return False
    for fake in tracked:
        constraints = getattr(fake.symbolic_context, "constraint_sizes", None)
        if constraints is None or not isinstance(fake.fake, torch.Tensor):
            continue
        for dim, constraint in zip(fake.fake.shape, constraints, strict=False):
            asked = constraint is not None and not constraint.warn_only  # else Dynamo saw the size change, and guessed
            if asked and isinstance(dim, torch.SymInt) and dim.node.expr.free_symbols & symbols:
                return False
    return True
