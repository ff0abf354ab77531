"""Runs the kernels around the Hopper backward in Triton's interpreter; prints {case: what went wrong} as JSON."""

from __future__ import annotations

import json
import traceback

import torch
import triton

from flash_inductor.kernels.hopper.around import finish_kernel, prepare_kernel

_CASES = {
    # name: (q_len, head dim, columns of the accumulator, grad_lse, deterministic)
    "plain": (128, 64, 64, False, False),
    "ragged": (70, 64, 64, True, True),
    "padded": (200, 80, 128, True, False),
    "wide": (65, 192, 256, False, True),
}


def run(q_len: int, head_dim: int, dim: int, with_grad_lse: bool, deterministic: bool) -> None:
    torch.manual_seed(0)
    batch, heads = 2, 3
    q_rows = triton.cdiv(q_len, 128) * 128
    out, grad_out = (torch.randn(batch, q_len, heads, head_dim).transpose(1, 2) for _ in range(2))
    lse, grad_lse = (torch.randn(batch, heads, q_len + 5)[:, :, 2 : q_len + 2] for _ in range(2))
    lse[:, 1, 3] = -torch.inf
    lse2, delta = (torch.full((batch * heads, q_rows), torch.nan) for _ in range(2))
    acc = torch.full((batch * heads, q_rows, dim), torch.nan)
    turns = torch.full((batch * heads * q_rows // 64,), -1, dtype=torch.int32) if deterministic else None
    prepare_kernel[(q_rows // 64 * batch * heads,)](
        out, grad_out, lse, grad_lse if with_grad_lse else None, lse2, delta, acc, turns,
        *out.stride()[:3], *grad_out.stride()[:3], lse.stride(1), grad_lse.stride(1), heads, q_len, q_rows,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), DIM=dim, BLOCK_M=64, GRAD_LSE=with_grad_lse,
        DETERMINISTIC=deterministic, ALIGN=8 if head_dim % 8 == 0 else 1,
    )  # fmt: skip
    want = (out * grad_out).sum(-1) - (grad_lse if with_grad_lse else 0)
    torch.testing.assert_close(delta[:, :q_len], want.flatten(0, 1))
    log2 = (lse / torch.log(torch.tensor(2.0))).masked_fill(lse == -torch.inf, 0)
    torch.testing.assert_close(lse2[:, :q_len], log2.flatten(0, 1))
    for x in (lse2[:, q_len:], delta[:, q_len:], acc, *([] if turns is None else [turns])):
        assert not x.any()

    rows = torch.randn(batch * heads, q_rows, dim)
    tiles = rows.view(batch * heads, q_rows // 64, 4, 2, 8, dim // 64, 8, 4, 2)  # warp, 8 rows, row; columns, pair, one
    acc = tiles.permute(0, 1, 5, 6, 2, 4, 7, 3, 8).contiguous()
    grad = torch.full((batch, q_len, heads, head_dim), torch.nan).transpose(1, 2)
    finish_kernel[(triton.cdiv(q_len, 64) * batch * heads,)](
        acc, grad, *grad.stride()[:3], heads, q_len, q_rows, 0.5, HEAD_DIM=head_dim, DIM=dim, ALIGN=8,
    )  # fmt: skip
    torch.testing.assert_close(grad, 0.5 * rows.view(batch, heads, q_rows, dim)[:, :, :q_len, :head_dim])


results = {}
for name, case in _CASES.items():
    try:
        run(*case)
        results[name] = ""
    except Exception:
        results[name] = traceback.format_exc()
print(json.dumps(results))
