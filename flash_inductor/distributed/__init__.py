"""Attention over sequences that ranks of ``torch.distributed`` share (context parallelism); see docs/distributed.md.

Imported only by who uses it: ``import flash_inductor.distributed``.
"""

from .api import ContextParallel
from .cost import Cost, Machine, Problem, cost
from .plan import Plan, Sequence, make_plan

__all__ = ["ContextParallel", "Cost", "Machine", "Plan", "Problem", "Sequence", "cost", "make_plan"]
