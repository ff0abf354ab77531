"""Cases made of public bug reports: small inputs with the right value, and a runner for all of them."""

from . import bands, compiling, layouts, lookalikes, masks, running, sizes, terms
from .book import Case

CASES: list[Case] = [
    case for module in (masks, bands, lookalikes, terms, layouts, sizes, compiling, running) for case in module.CASES
]
