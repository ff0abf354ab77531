"""Spellings of masks: (name, function of two sizes, kind), each with what it means, and negative twins."""

from __future__ import annotations

import torch

INF = float("inf")


def lowest():
    """A function: under dynamic=True Dynamo makes a global number an input of the graph."""
    return torch.finfo(torch.float32).min


def rows(n):
    return torch.arange(n)[:, None]


def columns(m):
    return torch.arange(m)[None, :]


def ones(n, m, dtype=torch.bool):
    return torch.ones(n, m, dtype=dtype)


def hf_mask(b, s, window=None, packed=True):
    """What transformers 5 leaves in the graph."""
    pos = (torch.arange(s) + 0).unsqueeze(0).expand(b, -1)
    bi = torch.arange(b)[:, None, None, None]
    qi, ki = (torch.arange(s) + 0)[None, None, :, None], (torch.arange(s) + 0)[None, None, None, :]
    q, k = (pos[bi, qi], pos[bi, ki]) if packed else (qi, ki)
    m = qi.new_ones((), dtype=torch.bool)
    if window:
        m = m & (k > q - window).to("cpu")
    m = m & (k <= q).to("cpu")
    if packed:
        seg = (torch.diff(pos, prepend=pos[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        m = m & (seg[bi, qi] == seg[bi, ki]).to("cpu")
    return m.expand(b, -1, s, s)


def hf_add(m):
    return torch.where(m, torch.zeros((), dtype=torch.float32), lowest())


def inplace_fill(n, m):
    x = torch.zeros(n, m)
    x.masked_fill_(columns(m) > rows(n), -INF)
    return x


def inplace_triu(n, m):
    return torch.full((n, m), -INF).triu_(1)


def inplace_and(n, m):
    x = ones(n, m)
    x &= columns(m) <= rows(n)
    x &= columns(m) > rows(n) - 3
    return x


def setitem_all(n, m):
    x = torch.empty(n, m, dtype=torch.bool)
    x[:] = columns(m) <= rows(n)
    return x


def copied(n, m):
    x = torch.empty(n, m)
    x.fill_(-INF)
    return torch.triu(x, diagonal=1)


def written_after_view(n, m):
    x = ones(n, m)
    x.logical_and_(columns(m) <= rows(n))
    return x[None, None].clone()


def index_select(n, m):
    return torch.arange(2 * n).index_select(0, torch.arange(n))[:, None] >= torch.arange(m + 1)[:-1]


# name: (kind, function of (q_len, kv_len), lower, upper) with bounds as functions of the sizes
POSITIVE = {
    "compare": ("keep", lambda n, m: rows(n) >= columns(m), None, lambda n, m: 0),
    "compare le": ("keep", lambda n, m: torch.le(columns(m), rows(n)), None, lambda n, m: 0),
    "compare lt plus one": ("keep", lambda n, m: columns(m).lt(rows(n) + 1), None, lambda n, m: 0),
    "compare difference": ("keep", lambda n, m: rows(n) - columns(m) >= 0, None, lambda n, m: 0),
    "compare negated": ("keep", lambda n, m: -rows(n) <= -columns(m), None, lambda n, m: 0),
    "doubled": ("keep", lambda n, m: 2 * rows(n) + 1 >= columns(m) * 2, None, lambda n, m: 0),
    "float indices": ("keep", lambda n, m: rows(n).float() >= columns(m).float(), None, lambda n, m: 0),
    "bottom right": ("keep", lambda n, m: columns(m) <= rows(n) + (m - n), None, lambda n, m: m - n),
    "arange from offset": (
        "keep",
        lambda n, m: torch.arange(m - n, m)[:, None] >= columns(m),
        None,
        lambda n, m: m - n,
    ),
    "slice from offset": ("keep", lambda n, m: torch.arange(n + 3)[3:, None] >= columns(m), None, lambda n, m: 3),
    "anti causal": ("keep", lambda n, m: columns(m) >= rows(n), lambda n, m: 0, None),
    "window": (
        "keep",
        lambda n, m: (columns(m) <= rows(n)) & (columns(m) > rows(n) - 4),
        lambda n, m: -3,
        lambda n, m: 0,
    ),
    "window abs": (
        "keep",
        lambda n, m: (rows(n) - columns(m)).abs() <= 2,
        lambda n, m: -2,
        lambda n, m: 2,
    ),
    "window abs dropped": (
        "drop",
        lambda n, m: (columns(m) - rows(n)).abs() > 2,
        lambda n, m: -2,
        lambda n, m: 2,
    ),
    "diagonal": ("keep", lambda n, m: rows(n) == columns(m), lambda n, m: 0, lambda n, m: 0),
    "not diagonal dropped": ("drop", lambda n, m: rows(n) != columns(m), lambda n, m: 0, lambda n, m: 0),
    "tril ones": ("keep", lambda n, m: ones(n, m).tril(), None, lambda n, m: 0),
    "tril diagonal": ("keep", lambda n, m: torch.tril(ones(n, m), diagonal=m - n), None, lambda n, m: m - n),
    "tril of tril": ("keep", lambda n, m: ones(n, m).tril().triu(-2), lambda n, m: -2, lambda n, m: 0),
    "not triu": ("keep", lambda n, m: ~ones(n, m).triu(1), None, lambda n, m: 0),
    "logical_not": ("keep", lambda n, m: torch.logical_not(torch.triu(ones(n, m), 1)), None, lambda n, m: 0),
    "drop triu": ("drop", lambda n, m: ones(n, m).triu(1), None, lambda n, m: 0),
    "drop tril == 0": ("drop", lambda n, m: torch.ones(n, m).tril() == 0, None, lambda n, m: 0),
    "drop < 0.5": ("drop", lambda n, m: torch.tril(torch.ones(n, m)) < 0.5, None, lambda n, m: 0),
    "tril != 0": ("keep", lambda n, m: torch.ones(n, m, dtype=torch.int8).tril() != 0, None, lambda n, m: 0),
    "tril.bool()": ("keep", lambda n, m: torch.ones(n, m, dtype=torch.uint8).tril().bool(), None, lambda n, m: 0),
    "1 - tril to bool": ("drop", lambda n, m: (1 - torch.ones(n, m).tril()).to(torch.bool), None, lambda n, m: 0),
    "or of drops": (
        "drop",
        lambda n, m: (columns(m) > rows(n)) | (columns(m) < rows(n) - 3),
        lambda n, m: -3,
        lambda n, m: 0,
    ),
    "product of masks": (
        "keep",
        lambda n, m: (torch.ones(n, m).tril() * torch.ones(n, m).triu(-3)).bool(),
        lambda n, m: -3,
        lambda n, m: 0,
    ),
    "sum of drops": (
        "drop",
        lambda n, m: (torch.ones(n, m).triu(1) + torch.ones(n, m).tril(-3)) > 0,
        lambda n, m: -2,
        lambda n, m: 0,
    ),
    "xor": ("drop", lambda n, m: ones(n, m) ^ ones(n, m).tril(), None, lambda n, m: 0),
    "transposed": ("keep", lambda n, m: (columns(n) >= rows(m)).transpose(0, 1), None, lambda n, m: 0),
    "permuted": ("keep", lambda n, m: ones(m, n).triu().permute(1, 0)[None], None, lambda n, m: 0),
    "viewed": ("keep", lambda n, m: ones(n, m).tril().view(1, 1, n, m), None, lambda n, m: 0),
    "expanded": ("keep", lambda n, m: ones(n, m).tril()[None, None].expand(2, 4, n, m), None, lambda n, m: 0),
    "repeated": ("keep", lambda n, m: ones(n, m).tril().unsqueeze(0).repeat(4, 1, 1), None, lambda n, m: 0),
    "squeezed": ("keep", lambda n, m: ones(n, m).tril()[None].expand(1, n, m).squeeze(0), None, lambda n, m: 0),
    "selected": ("keep", lambda n, m: ones(n, m).tril().expand(3, n, m)[1], None, lambda n, m: 0),
    "sliced": ("keep", lambda n, m: ones(n + 5, m + 5).tril()[:n, :m], None, lambda n, m: 0),
    "sliced rows": ("keep", lambda n, m: ones(n + 5, m).tril()[5:], None, lambda n, m: 5),
    "sliced columns": ("keep", lambda n, m: ones(n, m + 2).tril()[..., 2:], None, lambda n, m: -2),
    "sliced from the end": ("keep", lambda n, m: ones(m, m).tril()[m - n :], None, lambda n, m: m - n),
    "eye": ("keep", lambda n, m: torch.eye(n, m, dtype=torch.bool), lambda n, m: 0, lambda n, m: 0),
    "all": ("keep", lambda n, m: ones(n, m), None, None),
    "zeros": ("additive", lambda n, m: torch.zeros(n, m), None, None),
    "full triu": ("additive", lambda n, m: torch.full((n, m), -INF).triu(1), None, lambda n, m: 0),
    "finfo triu": ("additive", lambda n, m: torch.full((n, m), lowest()).triu(diagonal=1), None, lambda n, m: 0),
    "half": (
        "additive",
        lambda n, m: torch.full((n, m), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1),
        None,
        lambda n, m: 0,
    ),
    "to half": (
        "additive",
        lambda n, m: ((1.0 - torch.ones(n, m).tril()) * -1e9).to(torch.bfloat16),
        None,
        lambda n, m: 0,
    ),
    "1 - tril": ("additive", lambda n, m: (1.0 - torch.ones(n, m).tril()) * -1e4, None, lambda n, m: 0),
    "where": ("additive", lambda n, m: torch.where(rows(n) >= columns(m), 0.0, -INF), None, lambda n, m: 0),
    "where swapped": ("additive", lambda n, m: torch.where(rows(n) < columns(m), lowest(), 0.0), None, lambda n, m: 0),
    "masked_fill": (
        "additive",
        lambda n, m: torch.zeros(n, m).masked_fill(ones(n, m).triu(1), -INF),
        None,
        lambda n, m: 0,
    ),
    "masked_fill twice": (
        "additive",
        lambda n, m: (
            torch.ones(n, m)
            .tril()
            .masked_fill(torch.ones(n, m).tril() == 0, -INF)
            .masked_fill(torch.ones(n, m).tril() == 1, 0.0)
        ),
        None,
        lambda n, m: 0,
    ),
    "sum of additive": (
        "additive",
        lambda n, m: torch.full((n, m), -INF).triu(1) + torch.full((n, m), -INF).tril(-4),
        lambda n, m: -3,
        lambda n, m: 0,
    ),
    "in-place fill": ("additive", inplace_fill, None, lambda n, m: 0),
    "in-place triu": ("additive", inplace_triu, None, lambda n, m: 0),
    "in-place and": ("keep", inplace_and, lambda n, m: -2, lambda n, m: 0),
    "setitem": ("keep", setitem_all, None, lambda n, m: 0),
    "filled empty": ("additive", copied, None, lambda n, m: 0),
    "written, then viewed": ("keep", written_after_view, None, lambda n, m: 0),
    "hf": ("keep", lambda n, m: hf_mask(2, m)[:, :, :n], None, lambda n, m: 0),
    "hf window": ("keep", lambda n, m: hf_mask(2, m, 3)[:, :, :n], lambda n, m: -2, lambda n, m: 0),
    "hf not packed": ("keep", lambda n, m: hf_mask(2, m, 3, packed=False)[:, :, :n], lambda n, m: -2, lambda n, m: 0),
    "hf additive": ("additive", lambda n, m: hf_add(hf_mask(2, m))[:, :, :n], None, lambda n, m: 0),
    "cumsum positions": (
        "keep",
        lambda n, m: (torch.ones(n, dtype=torch.long).cumsum(0) - 1)[:, None] >= columns(m),
        None,
        lambda n, m: 0,
    ),
    "index_select": ("keep", index_select, None, lambda n, m: 0),
}


def through_a_view(n, m):
    x = ones(n, m)
    view = x[:, 1:]
    view.fill_(False)
    return x & (columns(m) <= rows(n))


def view_of_written(n, m):
    x = torch.zeros(n, m)
    view = x[None]
    x.masked_fill_(columns(m) > rows(n) * 2, -INF)
    return view


def part_assigned(n, m):
    x = ones(n, m).tril()
    x[0] = True
    return x


def out_argument(n, m):
    x = ones(n, m)
    torch.logical_and(x, columns(m) % 2 == 0, out=x)
    return x.tril()


def random_mask(n, m):
    return torch.rand(n, m).tril() > 0.5


# name: (kind, function), none of which is a band
NEGATIVE = {
    "column only": ("keep", lambda n, m: (columns(m) < 5).expand(n, m)),
    "row only": ("keep", lambda n, m: (rows(n) > 2).expand(n, m)),
    "slope two": ("keep", lambda n, m: columns(m) <= 2 * rows(n)),
    "sum of indices": ("keep", lambda n, m: columns(m) + rows(n) < 7),
    "chunked": ("keep", lambda n, m: (columns(m) // 4 == rows(n) // 4) & (columns(m) <= rows(n))),
    "prefix": ("keep", lambda n, m: (columns(m) <= rows(n)) | (columns(m) < 3)),
    "dilated": ("keep", lambda n, m: (columns(m) <= rows(n)) & (columns(m) % 2 == 0)),
    "heads differ": (
        "keep",
        lambda n, m: rows(n) + torch.arange(4)[:, None, None] >= columns(m),
    ),
    "band left out": ("keep", lambda n, m: (rows(n) - columns(m)).abs() > 2),
    "not a window": ("drop", lambda n, m: (columns(m) <= rows(n)) & (columns(m) > rows(n) - 4)),
    "nothing": ("drop", lambda n, m: ones(n, m)),
    "empty band": ("keep", lambda n, m: (columns(m) > rows(n)) & (columns(m) < rows(n))),
    "drop read as bool": ("drop", lambda n, m: torch.ones(n, m).tril()),
    "small fill": ("additive", lambda n, m: torch.zeros(n, m).masked_fill(ones(n, m).triu(1), -1.0)),
    "positive fill": ("additive", lambda n, m: torch.full((n, m), INF).triu(1)),
    "fill of minus 9999": ("additive", lambda n, m: torch.full((n, m), -9999.0).triu(1)),
    "one visible": ("additive", lambda n, m: torch.ones(n, m).masked_fill(ones(n, m).triu(1), -INF)),
    "zero and one": ("additive", lambda n, m: torch.ones(n, m).tril()),
    "distance bias": ("additive", lambda n, m: -(rows(n) - columns(m)).abs().float()),
    "nan": ("additive", lambda n, m: torch.ones(n, m).tril() * -INF),
    "finite empty rows of a window": (
        "additive",
        lambda n, m: torch.full((n + 9, m), lowest()).triu(1)[:n] + torch.full((n + 9, m), lowest()).tril(-1)[9:],
    ),
    "finite empty rows": ("additive", lambda n, m: torch.full((n, m), lowest()).triu(-1)),
    "int added": ("additive", lambda n, m: torch.full((n, m), -100000).triu(1)),
    "half positions": ("keep", lambda n, m: (rows(n).bfloat16() >= columns(m).bfloat16()) | (columns(m) < 3)),
    "write through a view": ("keep", through_a_view),
    "view of a written mask": ("additive", view_of_written),
    "a part assigned": ("keep", part_assigned),
    "out argument": ("keep", out_argument),
    "random": ("keep", random_mask),
    "uninitialised": ("keep", lambda n, m: torch.empty(n, m).tril() > 0),
}
