"""Adapters of the fused CUDA kernels, in the common form of `attention_kernels.py`.

They run with dropout 0 always: a kernel's own dropout depends on how the work is cut. The random state that backward
ops ask for is therefore an empty stand-in. A head_dim that is no multiple of 8 is filled up with zeros, which changes
neither scores nor context, while `scale` stays that of the true head_dim.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from freight.ops.attention_kernels import BlockCall, Grads

aten = torch.ops.aten

# The efficient kernel keeps lse in rows of 32 queries.
LSE_ALIGNMENT = 32


def flash_forward(q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 as ATen ships it, batched or varlen."""
    dim = q.shape[-1]
    q, k, v = _unbatch(call, *(_filled(x) for x in (q, k, v)))
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, *_borders(q, k, call), 0.0, call.causal, False, scale=call.scale, **_window(call)
    )
    if call.varlen is not None:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    return out[..., :dim], lse


def flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: BlockCall) -> Grads:
    """FlashAttention-2 as ATen ships it, batched or varlen."""
    dim = q.shape[-1]
    dout, q, k, v, out, lse = _unbatch(call, *(_filled(x) for x in (dout, q, k, v, out)), lse.contiguous())
    grads = aten._flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        *_borders(q, k, call),
        0.0,
        call.causal,
        torch.empty(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, dtype=torch.uint64, device=q.device),
        scale=call.scale,
        **_window(call),
    )
    return _rebatch(call, dim, *grads)


def flash_attn_forward(q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> tuple[Tensor, Tensor]:
    """The flash-attn package (optional), which also knows softcap."""
    dim = q.shape[-1]
    q, k, v = _unbatch(call, *(_filled(x) for x in (q, k, v)))
    function, borders = _package_function("forward", call)
    out, lse, *_ = function(
        q=q,
        k=k,
        v=v,
        **borders,
        dropout_p=0.0,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size_left=call.window_left,
        window_size_right=0 if call.window_left >= 0 else -1,
        softcap=call.softcap or 0.0,
        alibi_slopes=None,
        return_softmax=False,
    )
    if call.varlen is not None:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    return out[..., :dim], lse


def flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: BlockCall
) -> Grads:
    """The flash-attn package (optional)."""
    dim = q.shape[-1]
    dout, q, k, v, out, lse = _unbatch(call, *(_filled(x) for x in (dout, q, k, v, out)), lse.contiguous())
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    function, borders = _package_function("backward", call)
    function(
        dout=dout,
        q=q,
        k=k,
        v=v,
        out=out,
        softmax_lse=lse,
        dq=dq,
        dk=dk,
        dv=dv,
        **borders,
        dropout_p=0.0,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size_left=call.window_left,
        window_size_right=0 if call.window_left >= 0 else -1,
        softcap=call.softcap or 0.0,
        alibi_slopes=None,
        deterministic=call.deterministic,
        rng_state=None,
    )
    return _rebatch(call, dim, dq, dk, dv)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> tuple[Tensor, Tensor]:
    """CuDNN's fused attention through ATen; its lse comes with a last dim of 1."""
    dim = q.shape[-1]
    q, k, v = (_filled(x).transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, call.causal, False, scale=call.scale
    )
    return out.transpose(1, 2)[..., :dim], lse.view(*out.shape[:3])


def cudnn_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: BlockCall) -> Grads:
    """CuDNN's fused attention through ATen."""
    dim, tokens_q, tokens_k = q.shape[-1], q.shape[1], k.shape[1]
    dout, q, k, v, out = (_filled(x).transpose(1, 2) for x in (dout, q, k, v, out))
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous().unsqueeze(-1),
        unused,
        unused,
        None,
        None,
        None,
        tokens_q,
        tokens_k,
        0.0,
        call.causal,
        scale=call.scale,
    )
    dq, dk, dv = (x.transpose(1, 2)[..., :dim] for x in grads)
    return dq, dk, dv


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel: knows no shared KV heads, and pads lse."""
    dim, tokens = q.shape[-1], q.shape[1]
    k, v = _expanded(k, q), _expanded(v, q)
    q, k, v = (_filled(x).transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, call.causal, scale=call.scale)
    return out.transpose(1, 2)[..., :dim], lse[..., :tokens]


def efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: BlockCall
) -> Grads:
    """The memory-efficient kernel; gradients of expanded KV heads are summed again."""
    dim, groups = q.shape[-1], k.shape[2]
    lse = F.pad(lse, (0, -q.shape[1] % LSE_ALIGNMENT), value=float("inf")).contiguous()
    k, v = _expanded(k, q), _expanded(v, q)
    dout, q, k, v, out = (_filled(x).transpose(1, 2) for x in (dout, q, k, v, out))
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        k,
        v,
        None,
        out,
        lse,
        unused,
        unused,
        0.0,
        (True, True, True, False),
        call.causal,
        scale=call.scale,
    )
    dq, dk, dv = (x.transpose(1, 2)[..., :dim] for x in (dq, dk, dv))
    return dq, _summed(dk, groups), _summed(dv, groups)


def _filled(x: Tensor) -> Tensor:
    """Contiguous, head_dim filled up to a multiple of 8 with zeros."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def _expanded(x: Tensor, q: Tensor) -> Tensor:
    """`[n, tokens, groups, d]` -> `[n, tokens, heads, d]`."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _summed(grad: Tensor, groups: int) -> Tensor:
    """`[n, tokens, heads, d]` -> `[n, tokens, groups, d]`, summed in float32."""
    return grad.unflatten(2, (groups, -1)).sum(3, dtype=torch.float32)


def _unbatch(call: BlockCall, *tensors: Tensor) -> tuple[Tensor, ...]:
    """With varlen, `[1, tokens, ...]` -> `[tokens, ...]`."""
    return tensors if call.varlen is None else tuple(x[0] for x in tensors)


def _rebatch(call: BlockCall, dim: int, *grads: Tensor) -> Grads:
    """The inverse for gradients, cut to the true head_dim."""
    dq, dk, dv = (x[..., :dim] if call.varlen is None else x[..., :dim].unsqueeze(0) for x in grads)
    return dq, dk, dv


def _borders(q: Tensor, k: Tensor, call: BlockCall) -> tuple[Tensor | None, Tensor | None, int, int]:
    """cu_seqlens of queries and keys, and the longest of each."""
    return call.varlen if call.varlen is not None else (None, None, q.shape[1], k.shape[1])


def _window(call: BlockCall) -> dict[str, int]:
    """Keyword arguments of a native window."""
    return {} if call.window_left < 0 else {"window_size_left": call.window_left, "window_size_right": 0}


def _package_function(direction: str, call: BlockCall) -> tuple[Any, dict[str, Any]]:
    """The package's function and its border arguments; imported here because the package is optional."""
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    if call.varlen is None:
        return getattr(interface, f"_flash_attn_{direction}"), {}
    cu_q, cu_k, max_q, max_k = call.varlen
    borders = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return getattr(interface, f"_flash_attn_varlen_{direction}"), borders
