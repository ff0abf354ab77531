"""Attention as people write it by hand, and torch's own modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .registry import (
    BATCH,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    LENGTH,
    PADDED,
    VOCABULARY,
    WINDOW,
    Inputs,
    entry,
    tokens,
)

Tensor = torch.Tensor


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), attention
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, INTERMEDIATE), nn.GELU(), nn.Linear(INTERMEDIATE, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList([Block(attention()) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, idx: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(idx) + self.position(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        y = self.head(self.norm(x))
        return y if labels is None else F.cross_entropy(y.view(-1, VOCABULARY), labels.view(-1))


class Attention(nn.Module):
    """nanoGPT's layout: one linear, split, view, transpose.  Subclasses fill in ``attend``."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN), dropout
        self.drop = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (y.view(b, n, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(x).split(HIDDEN, dim=2))
        y = self.attend(q, k, v, n)
        return self.out(y.transpose(1, 2).contiguous().view(b, n, c))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        raise NotImplementedError


class NanoEager(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :n, :n] == 0, float("-inf"))
        return self.drop(F.softmax(scores, dim=-1)) @ v


class NanoFlash(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        dropout = self.dropout if self.training else 0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)


class MinGPT(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        k, q, v = (f(x).view(b, n, HEADS, c // HEADS).transpose(1, 2) for f in (self.key, self.query, self.value))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.bias[:, :, :n, :n] == 0, float("-inf"))
        y = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, n, c))


class TriuWhere(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        hidden = torch.triu(torch.ones(n, n, dtype=torch.bool, device=q.device), diagonal=1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(HEAD_DIM)
        scores = torch.where(hidden, torch.finfo(scores.dtype).min, scores)
        return torch.matmul(scores.softmax(-1), v)


class TriuAdd(Attention):
    """As Llama's reference code: a triangle of -inf is added, softmax in float32."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        mask = torch.triu(torch.full((n, n), float("-inf"), device=q.device), diagonal=1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(HEAD_DIM) + mask
        return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)


class SdpaTrilMask(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class SlidingArange(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        d = torch.arange(n, device=q.device)[:, None] - torch.arange(n, device=q.device)[None, :]
        scores = (q * HEAD_DIM**-0.5) @ k.transpose(-1, -2)
        return scores.masked_fill(~((d >= 0) & (d < WINDOW)), float("-inf")).softmax(-1) @ v


class Alibi(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        at = torch.arange(n, device=q.device)
        slopes = torch.tensor([2.0 ** (-8 * (i + 1) / HEADS) for i in range(HEADS)], device=q.device)
        bias = (at[None, :] - at[:, None]) * slopes[:, None, None]
        bias = bias.masked_fill(at[None, :] > at[:, None], float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


class LucidEinsum(nn.Module):
    """einops and einsum, the scale on the query, masked_fill with -finfo.max."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange

        q, k, v = (rearrange(y, "b n (h d) -> b h n d", h=HEADS) for y in self.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("b h i d, b h j d -> b h i j", q * HEAD_DIM**-0.5, k)
        i, j = scores.shape[-2:]
        hidden = torch.ones((i, j), dtype=torch.bool, device=scores.device).triu(j - i + 1)
        scores = scores.masked_fill(hidden, -torch.finfo(scores.dtype).max)
        y = torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(dim=-1), v)
        return self.out(rearrange(y, "b h n d -> b n (h d)"))


class GroupedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(HIDDEN, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM) for _ in range(2))


class BshdEinsum(GroupedLinear):
    """As in JAX: no transpose of heads."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, HEADS, HEAD_DIM)
        k, v = (f(x).view(b, n, KV_HEADS, HEAD_DIM) for f in (self.k, self.v))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=2) for y in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
        at = torch.arange(n, device=x.device)
        scores = scores.masked_fill(at[None] > at[:, None], float("-inf"))
        return self.out(torch.einsum("bhqk,bkhd->bqhd", F.softmax(scores, -1), v).reshape(b, n, -1))


class GroupedEinsum(GroupedLinear):
    """Grouped queries in five dims, with a softcap."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        k, v = (f(x).view(b, n, KV_HEADS, HEAD_DIM) for f in (self.k, self.v))
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) * HEAD_DIM**-0.5
        scores = 30.0 * torch.tanh(scores / 30.0)
        scores = scores + torch.full((n, n), float("-inf"), device=x.device).triu(1)
        return self.out(torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), v).reshape(b, n, -1))


class MultiheadAttention(nn.Module):
    def __init__(self, weights: bool, causal: bool) -> None:
        super().__init__()
        self.attention, self.weights, self.causal = (
            nn.MultiheadAttention(HIDDEN, HEADS, dropout=0.1, batch_first=True),
            weights,
            causal,
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device) if self.causal else None
        y: Tensor = self.attention(x, x, x, need_weights=self.weights, attn_mask=mask, is_causal=self.causal)[0]
        return y


def language_model(name: str, attention: Callable[[], nn.Module], implementation: str = "eager") -> None:
    @entry(name, "handwritten", (implementation,), "einops" if attention is LucidEinsum else "torch")
    def make(implementation: str, train: bool = True, padding: str | None = None) -> tuple[nn.Module, Inputs]:
        ids = tokens()
        return LanguageModel(attention), {"idx": ids, **({"labels": ids.clone()} if train else {})}


language_model("nanogpt_eager", NanoEager)
language_model("nanogpt_flash", NanoFlash, "sdpa")
language_model("mingpt", MinGPT)
language_model("hand_triu_where", TriuWhere)
language_model("hand_llama_ref_triu_add", TriuAdd)
language_model("hand_sdpa_tril_mask", SdpaTrilMask, "sdpa")
language_model("hand_sliding_arange", SlidingArange)
language_model("hand_lucid_einsum", LucidEinsum)
language_model("hand_bshd_einsum_gqa", BshdEinsum)
language_model("hand_grouped_einsum_softcap", GroupedEinsum)
language_model("hand_alibi_sdpa", Alibi, "sdpa")
language_model("mha_needweights", lambda: MultiheadAttention(True, False), "default")
language_model("mha_noweights", lambda: MultiheadAttention(False, False), "default")
language_model("mha_causal", lambda: MultiheadAttention(False, True), "default")


class Encoder(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, INTERMEDIATE, batch_first=True)
        self.causal, self.encoder = causal, nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device) if self.causal else None
        y: Tensor = self.encoder(x, mask=mask, is_causal=self.causal, src_key_padding_mask=padding)
        return y


def torch_encoder(name: str, *, causal: bool = False, padded: bool = False) -> None:
    @entry(name, "handwritten", ("default",), "torch")
    def make(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
        inputs = {"x": torch.randn(BATCH, LENGTH, HIDDEN)}
        if padded:
            inputs["padding"] = torch.arange(LENGTH) >= LENGTH - torch.tensor([[0], [PADDED]])
        return Encoder(causal), inputs


torch_encoder("tel")
torch_encoder("tel_causal", causal=True)
torch_encoder("tel_padding", padded=True)


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(HIDDEN, HEADS, 1, 1, INTERMEDIATE, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        y: Tensor = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        return y


@entry("nn_transformer", "handwritten", ("default",), "torch")
def nn_transformer(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    return Seq2Seq(), {"source": torch.randn(BATCH, LENGTH, HIDDEN), "target": torch.randn(BATCH, 24, HIDDEN)}
