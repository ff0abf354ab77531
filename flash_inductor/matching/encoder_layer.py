"""``torch._transformer_encoder_layer_fwd``: what nn.TransformerEncoderLayer calls in evaluation without gradients.

The whole layer is one node.  It is opened as `mha` opens the attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from . import safety
from .canonical import tensor
from .emitter import Emitter
from .mha import Opened
from .program import Program, Refused

aten = torch.ops.aten
FORM = "transformer_encoder_layer"
_TARGET = torch._transformer_encoder_layer_fwd
_NAMES = (
    "src embed_dim num_heads qkv_weight qkv_bias proj_weight proj_bias use_gelu norm_first eps norm_weight_1 "  # noqa: SIM905
    "norm_bias_1 norm_weight_2 norm_bias_2 ffn_weight_1 ffn_bias_1 ffn_weight_2 ffn_bias_2 mask mask_type".split()
)


def is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is _TARGET


def masks(node: fx.Node) -> list[Any]:
    return [_arguments(node).get("mask")]


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}


def open_call(program: Program, node: fx.Node) -> Opened:
    """Emit the layer with SDPA in the middle.  Raises Refused, the graph as it was."""
    args = _arguments(node)
    source = safety.check_tensor(args["src"], "query")
    heads, width = args["num_heads"], args["embed_dim"]
    if source.dim() != 3 or not isinstance(heads, int) or not isinstance(width, int):
        raise Refused(
            "the encoder layer's input isn't [batch, length, embedding] with a constant embedding; "
            "mark only batch and length as dynamic, and pass three dims"
        )
    if not isinstance(args["use_gelu"], bool) or not isinstance(args["norm_first"], bool):
        raise Refused("the encoder layer's options aren't constants; use Python numbers and bools")
    e = Emitter(node, args["src"])
    try:
        sdpa, result = _emit(e, args, heads, width)
        new, old = tensor(result), tensor(node)
        if new is None or old is None or new.shape != old.shape or new.dtype is not old.dtype:
            raise Refused(
                "the result of the encoder layer could not be kept; "
                "compile with dynamic=False, or use batch_first=True and dense inputs"
            )
        return Opened(node, sdpa, result, e, first_of_several=False)
    except Exception:
        e.undo()
        raise


def _emit(e: Emitter, args: dict[str, Any], heads: int, width: int) -> tuple[fx.Node, fx.Node]:
    def norm(x: fx.Node, which: int) -> fx.Node:
        weight, bias = args[f"norm_weight_{which}"], args[f"norm_bias_{which}"]
        return e.call(F.layer_norm, x, (width,), weight, bias, args["eps"])

    x, first = args["src"], args["norm_first"]
    packed = e.call(F.linear, norm(x, 1) if first else x, args["qkv_weight"], args["qkv_bias"])
    opened = e.call(aten.permute.default, e.call(aten.unflatten.int, packed, -1, [3, heads, -1]), [2, 0, 3, 1, 4])
    query, key, value = (e.call(aten.select.int, opened, 0, part) for part in range(3))
    mask = _mask(e, args)
    sdpa = e.call(F.scaled_dot_product_attention, query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=False)
    merged = e.call(aten.flatten.using_ints, e.call(aten.permute.default, sdpa, [0, 2, 1, 3]), 2, 3)
    x = e.call(torch.add, x, e.call(F.linear, merged, args["proj_weight"], args["proj_bias"]))
    x = x if first else norm(x, 1)
    hidden = e.call(F.linear, norm(x, 2) if first else x, args["ffn_weight_1"], args["ffn_bias_1"])
    hidden = e.call(F.gelu if args["use_gelu"] else F.relu, hidden)
    x = e.call(torch.add, x, e.call(F.linear, hidden, args["ffn_weight_2"], args["ffn_bias_2"]))
    return sdpa, (x if first else norm(x, 2))


def _mask(e: Emitter, args: dict[str, Any]) -> fx.Node | None:
    """SDPA's bool mask.  The layer takes every number but 0 for True, and True hides."""
    mask, kind = args.get("mask"), args.get("mask_type")
    value = tensor(mask)
    if mask is None:
        return None
    if value is None or (kind, value.dim()) not in ((0, 2), (1, 2), (2, 4)):
        raise Refused(
            "the encoder layer's mask isn't understood; "
            "pass src_mask or src_key_padding_mask as bool or float tensors, or is_causal=True with src_mask"
        )
    if kind == 1:
        mask = e.call(aten.unsqueeze.default, e.call(aten.unsqueeze.default, mask, 1), 1)
    if value.dtype is not torch.bool:
        mask = e.call(aten.to.dtype, mask, torch.bool)
    return e.call(torch.logical_not, mask)
