"""The tile configurations of Triton's kernels on a device: the table's, or the user's own."""

from __future__ import annotations

from ..config import get_config
from ..kernels.configs import Config, Kind, configs, fitting
from . import tuned


def tile_configs(
    kind: Kind,
    capability: int,
    block_d: int,
    block_dv: int,
    itemsize: int,
    max_shared_memory: int | None = None,
    pair_bytes: int = 0,
) -> tuple[Config, ...]:
    """:func:`kernels.configs.configs`, the tiles of the user's own table first.

    Unless ``Config.kernel_options`` sets this kind of kernel: then that one config.

    What an option leaves out is taken from the table's first config.  A tile of the user's is not checked against the
    shared memory: Triton says so itself, with the number.
    """
    sizes = (capability, block_d, block_dv, itemsize, max_shared_memory, pair_bytes)
    table = configs(kind, *sizes)
    mine = tuned.current().tiles.get((capability, kind, max(64, block_d, block_dv)), ())
    if mine and itemsize == 2:  # what tune measures
        table = tuple(dict.fromkeys([*fitting(kind, mine, *sizes), *table]))
    options = get_config().kernel_options.get(kind)
    return table if options is None else (table[0]._replace(**options),)
