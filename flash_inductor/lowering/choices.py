"""Which configurations of a template compete for a node: the table's first, or all of it under max_autotune."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._compat import inductor
from .._compat.inductor import Expr, IRNode
from ..kernels.configs import Config, Kind
from ..kernels.grad_bias import CHUNK
from ..ops import triton_kernels as eager
from ..ops.tiles import tile_configs
from .features import Optionals

log = logging.getLogger(__name__)
_TEMPLATES = Path(__file__).parent / "templates"


# Everything lies on the first axis of the grid: the other two end at 65535, which batch * heads can pass.
@inductor.SymbolicGridFn
def query_grid(batch_heads: Any, length: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    """One program for each tile of query rows of each head."""
    return cdiv(length, meta["BLOCK_M"]) * batch_heads, 1, 1


@inductor.SymbolicGridFn
def key_grid(batch_heads: Any, length: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    """One program for each tile of key rows of each key/value head."""
    return cdiv(length, meta["BLOCK_N"]) * batch_heads, 1, 1


@inductor.SymbolicGridFn
def bias_grid(batch_heads: Any, q_len: Any, kv_len: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    """One program for each tile of each matrix of the bias, or for each chunk of rows or keys that are summed."""
    rows = cdiv(q_len, CHUNK if meta["SUM_ROWS"] else meta["BLOCK_M"])
    return rows * cdiv(kv_len, CHUNK if meta["SUM_COLS"] else meta["BLOCK_N"]) * batch_heads, 1, 1


def load_template(name: str, grid: Any) -> Any:
    """The template in ``templates/<name>.py.jinja``, called flashbwd_<name> in kernels and logs."""
    files = ("common.jinja", f"{name}.py.jinja")
    return inductor.template(f"flashbwd_{name}", grid, "".join((_TEMPLATES / file).read_text() for file in files))


def candidates(kind: Kind, query: IRNode, constants: dict[str, Any], pair_bytes: int) -> tuple[Config, ...]:
    """Configurations to offer; those that ask for more shared memory than the device has are left out."""
    capability, shared_memory = eager.device_limits(query.get_device().index or 0)
    itemsize = query.get_dtype().itemsize
    blocks = constants["BLOCK_D"], constants["BLOCK_DV"]
    found = tile_configs(kind, capability, *blocks, itemsize, shared_memory, pair_bytes)
    return found if inductor.max_autotune() else found[:1]


def launch(
    template: Any,
    kind: Kind,
    inputs: Sequence[IRNode],
    layout: Any,
    call_sizes: Sequence[Expr],
    constants: dict[str, Any],
    mutated: Sequence[IRNode] = (),
    *,
    extra: Optionals,
) -> IRNode | None:
    """The template's output in the best configuration; None if none of them can be rendered or timed.

    ``inputs`` start with query; those of ``extra`` and ``mutated``, the ones the kernel writes, follow them.
    """
    inputs = [*inputs, *extra.inputs, *mutated]
    constants = {**constants, **extra.constants}
    choices: list[Any] = []
    for config in candidates(kind, inputs[0], constants, extra.pair_bytes):
        error = inductor.append_choice(
            to=choices,
            of=template,
            inputs=inputs,
            layout=layout,
            call_sizes=call_sizes,
            mutated=mutated,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            constants={**constants, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n},
        )
        if error is not None:
            log.warning("%s: %s can't be rendered: %s: %s", template.name, config, type(error).__name__, error)
    if not choices:
        return None
    try:
        return inductor.select(template.name, choices, inputs, layout)
    except Exception as error:  # under max_autotune, that not one of them could be compiled and timed
        log.warning("%s: the op is called instead: %s: %s", template.name, type(error).__name__, error)
        return None
