"""Eager CUDA: chooses a kernel and launches it.

All that depends on shapes, strides, dtypes and options only is done once, by :func:`prepare`.  The Triton launch behind
it also runs on CPU tensors under TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._compat import compile_workers
from .._compat.cuda_driver import empty_strided
from ..config import get_config
from ..kernels.choices import Kind
from ..spec import MaskSpec
from ..support import effective_mask
from . import ahead, aten, choice, triton_kernels, tuned
from .launch import Repeated
from .layout import dense_strides, empty_like_layout, has_wide_rows
from .triton_kernels import on_device

log = logging.getLogger(__name__)
_BAND: dict[str, Any] = {"is_causal": False, "window_left": None, "window_right": None, "diagonal": 0}
_OPTIONS = {*_BAND, "scale", "softcap", "dropout_p", "grad_mask"}
ALL = (True, True, True, False, False)


def forward(
    query: Tensor, key: Tensor, value: Tensor, *, kernel_name: str | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """``flashbwd::attn`` on CUDA tensors: out [B, Hq, Nq, Dv] in query's dtype and layout, lse fp32 [B, Hq, Nq].

    fp16, bf16 or fp32; head dims up to 256.  ``options`` are those of :func:`triton_kernels.forward`, which runs
    wherever one of them is its own (``config``, the optional tensors, dropout).  Arguments are taken as valid.

    Raises NotImplementedError if ``kernel_name`` names one that doesn't take the problem.
    """
    tensors = (query, key, value)
    return prepare("fwd", tensors, {**options, "kernel_name": kernel_name})(*tensors)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_mask: Sequence[bool] = ALL,
    kernel_name: str | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias on CUDA tensors; shape [0] where ``grad_mask`` is False.

    ``flashbwd::attn_backward`` but for the gradient of the sinks, which is the same on every device.  ``options`` and
    errors as for :func:`forward`.
    """
    tensors = (grad_out, grad_lse, query, key, value, out, lse)
    return prepare("bwd", tensors, {**options, "grad_mask": grad_mask, "kernel_name": kernel_name})(*tensors)


def prepare(kind: Kind, tensors: Sequence[Tensor | None], options: dict[str, Any]) -> Callable[..., Any]:
    """What computes a call, given its tensors again or others like them.

    Like them: of the same shapes, strides, dtypes and device, under the same ``Config.kernel``, ``Config.table`` and
    ``torch.use_deterministic_algorithms``.
    """
    options = dict(options)
    kernel = options.pop("kernel_name", None)
    triton = partial(triton_kernels.forward if kind == "fwd" else triton_kernels.backward, **options)
    query, key, value = tensors[:3] if kind == "fwd" else tensors[2:5]
    assert query is not None and key is not None and value is not None
    if options.get("dropout_p") or any(options[name] is not None for name in options.keys() - _OPTIONS):
        if kernel not in (None, "triton"):
            raise NotImplementedError(_cannot(kernel, "it knows no bias, mask, segments, sinks and dropout"))
        return triton
    if kernel == "triton" or not query.is_cuda:  # or in Triton's interpreter
        return triton
    q_len, kv_len, head_dim = query.shape[2], key.shape[2], query.shape[3]
    mask = MaskSpec.from_window(*(options.get(name, default) for name, default in _BAND.items()))
    band, square = choice.classify(mask, q_len, kv_len, same_length=q_len == kv_len)
    deterministic = torch.are_deterministic_algorithms_enabled()
    scale, softcap = options.get("scale"), options.get("softcap")
    problem = choice.Problem(
        kind,
        choice.device_limits(query.device.index)[0],
        query.dtype,
        head_dim,
        value.shape[3],
        (q_len, kv_len),
        band,
        square,
        scale,
        softcap is not None,
        grad_lse=kind == "bwd" and tensors[1] is not None,
        deterministic=deterministic,
        pairs=math.prod((*query.shape[:3], kv_len)),
    )
    if kernel is not None:
        reason = choice.refusal(kernel, problem._replace(deterministic=False))
        if reason is not None:
            raise NotImplementedError(_cannot(kernel, reason))
    # Compiled code names a kernel for all lengths and both modes: where it can't be that one, the table decides.
    if kernel is None or not choice.fits(kernel, problem):
        kernel = choice.choose(problem, get_config().kernel, tuned.current())
    read = [x for x in (tensors[:3] if kind == "fwd" else (tensors[0], *tensors[2:6])) if x is not None]
    if kernel == "triton" or query.numel() == 0 or key.numel() == 0 or not all(map(has_wide_rows, read)):
        return triton
    numbers = _numbers(options, query, key)
    make: Callable[[str], Callable[..., Any]]
    if kind == "fwd":
        make = partial(_forward, triton=triton, query=query, value=value, numbers=numbers)
    else:
        wanted = tuple(options.get("grad_mask", ALL)[:3])
        if not any(wanted):
            return triton
        numbers["deterministic"] = deterministic
        make = partial(_backward, triton=triton, inputs=(query, key, value), wanted=wanted, numbers=numbers)
    return _or_next(make, triton, problem, kernel)


def compile_ahead(kind: Kind, tensors: Sequence[Tensor | None], device: int, options: dict[str, Any]) -> None:
    """Begin to compile what Gluon launches for a call: ``tensors`` are like its tensors, on the meta device.

    ``options`` are those of :func:`prepare`; without a worker of Inductor's, or on a GPU that isn't Hopper's, nothing
    is begun.
    """
    arch = choice.device_limits(device)[0]
    if arch != 90 or not compile_workers.running():
        return
    from . import hopper, hopper_backward

    query, key, value = tensors[:3] if kind == "fwd" else tensors[2:5]
    assert query is not None and key is not None and value is not None
    numbers = _numbers(options, query, key)
    if kind == "fwd":
        out = empty_like_layout(query, (*query.shape[:3], value.shape[3]))
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        counter = query.new_empty(1, dtype=torch.int32)
        processors = hopper.processors_of(device)
        launches = hopper.forward(query, key, value, out, lse, counter, **numbers, processors=processors)
    else:
        grad_out, grad_lse, *inputs = tensors
        lines = [None if x is None else x.contiguous() for x in (grad_lse, inputs.pop())]
        grads = [empty_like_layout(x, x.shape) for x in (query, key, value)]
        given: Any = (grad_out, lines[0], *inputs, lines[1], *grads)
        deterministic = torch.are_deterministic_algorithms_enabled()
        launches = hopper_backward.backward(*given, **numbers, deterministic=deterministic)
    for launch in launches:
        ahead.begin(launch.kernel, launch.constants, launch.args, arch, device)


def _numbers(options: dict[str, Any], query: Tensor, key: Tensor) -> dict[str, Any]:
    """What Hopper's and ATen's kernels are told of a call beside its tensors."""
    mask = MaskSpec.from_window(*(options.get(name, default) for name, default in _BAND.items()))
    scale = options.get("scale")
    return {
        "scale": 1.0 / math.sqrt(query.shape[3]) if scale is None else scale,
        "mask": effective_mask(mask, query.shape[2], key.shape[2]),
        "softcap": options.get("softcap"),
    }


def _forward(
    kernel: str, triton: Callable[..., Any], query: Tensor, value: Tensor, numbers: dict[str, Any]
) -> Callable[..., Any]:
    rows = tuple(query.shape[:3])
    size = (*rows, value.shape[3])
    strides = dense_strides(query.stride(), query.shape, size)
    dtype = query.dtype
    if kernel == "gluon":
        from . import hopper

        index = query.device.index
        launch = Repeated(_bound(hopper.forward, numbers), index)
        lse_strides = (rows[1] * rows[2], rows[2], 1)

        def gluon(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            if (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
                return triton(query, key, value)
            with on_device(query):
                out = empty_strided(size, strides, dtype)
                lse = empty_strided(rows, lse_strides, torch.float32)
                launch(query, key, value, out, lse, hopper.tile_counter(index))
            return out, lse

        return gluon
    called = partial(aten.FORWARD[kernel], is_causal=numbers["mask"].upper is not None, scale=numbers["scale"])

    def of_aten(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
            return triton(query, key, value)
        with on_device(query):
            out, lse = called(query, key, value)
        return _laid_out(out, query, strides), lse

    return of_aten


def _backward(
    kernel: str,
    triton: Callable[..., Any],
    inputs: tuple[Tensor, Tensor, Tensor],
    wanted: tuple[bool, ...],
    numbers: dict[str, Any],
) -> Callable[..., Any]:
    strides = [dense_strides(x.stride(), x.shape, x.shape) for x in inputs]
    outputs = [(tuple(x.shape), stride) for x, stride in zip(inputs, strides, strict=True)]
    dtype = inputs[0].dtype
    launch: Callable[..., Any]
    if kernel == "gluon":
        from . import hopper_backward
        from .hopper_problem import scratch_size

        launch = Repeated(_bound(hopper_backward.backward, numbers), inputs[0].device.index)
        scratch = (scratch_size(inputs[0], inputs[2], numbers["deterministic"]),)
    else:
        launch = _bound(
            aten.BACKWARD[kernel], {"is_causal": numbers["mask"].upper is not None, "scale": numbers["scale"]}
        )

    def run(
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, ...]:
        if (grad_out.data_ptr() | query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr()) & 15:
            return triton(grad_out, grad_lse, query, key, value, out, lse)
        with on_device(query):
            if kernel == "gluon":
                grads = [empty_strided(*output, dtype) for output in outputs]
                lse = _in_lines(lse)
                grad_lse = None if grad_lse is None else _in_lines(grad_lse)
                memory = empty_strided(scratch, (1,), torch.float32)
                launch(grad_out, grad_lse, query, key, value, out, lse, *grads, memory)
            else:
                given: Any = launch(grad_out, query, key, value, out, lse.contiguous())
                grads = list(map(_laid_out, given, (query, key, value), strides))
            nothing = empty_strided((0,), (1,), dtype)
        # All are computed together: what isn't wanted was scratch.
        found = (grad if want else grad.new_empty(0) for grad, want in zip(grads, wanted, strict=True))
        return (*found, nothing)

    return run


def _or_next(
    make: Callable[[str], Callable[..., Any]], triton: Callable[..., Any], problem: choice.Problem, kernel: str
) -> Callable[..., Any]:
    """What a kernel's call is, with what computes the problem instead if that fails: Gluon for cuDNN, else Triton."""
    if kernel not in ("cudnn", "gluon"):
        return make(kernel)
    instead = triton
    if kernel == "cudnn" and choice.fits("gluon", problem):
        instead = _or(make("gluon"), triton, problem, "gluon")
    return _or(make(kernel), instead, problem, kernel)


def _or(
    call: Callable[..., Any], instead: Callable[..., Any], problem: choice.Problem, kernel: str
) -> Callable[..., Any]:
    """``call``, and from its first failure on ``instead``.

    Which plans a cuDNN has shows when it is asked for one.  A Gluon kernel needs this Triton's compiler to take it, and
    the GPU to have the memory on chip.  Such a failure of Gluon is raised if ``Config.strict`` is set.
    """
    works = True
    expected = RuntimeError if kernel == "cudnn" else Exception

    def run(*tensors: Tensor | None) -> Any:
        nonlocal works
        if works:
            try:
                return call(*tensors)
            except torch.OutOfMemoryError:
                raise
            except expected as error:
                if kernel != "cudnn" and get_config().strict:
                    raise
                works, name = False, type(error).__name__
                log.warning("%s can't compute %s, another kernel does: %s: %s", kernel, problem, name, error)
        return instead(*tensors)

    return run


def _bound(function: Callable[..., Any], numbers: dict[str, Any]) -> Callable[..., Any]:
    return partial(function, **numbers)


def _in_lines(x: Tensor) -> Tensor:
    """x, or a copy that is contiguous and starts where 16 bytes may be loaded at once, as kernels are compiled."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() & 15 else x


def _cannot(kernel: str, reason: str) -> str:
    return f"kernel_name: {kernel} was asked for, but {reason}; leave it None for one that can"


def _laid_out(x: Tensor, like: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with the strides the op promises: a copy if ATen chose others."""
    return x if x.stride() == strides else empty_like_layout(like, x.shape).copy_(x)
