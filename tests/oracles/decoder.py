"""A slow, obvious decoder: one document at a time, float64, one token against one token, full logits.

It shares nothing with the model but the names of its parameters. Gradients come from autograd through plain operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from freight.config.architecture import Architecture
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec
from tests.oracles.rope import frequencies, rotate

Weights = Mapping[str, Tensor]


def reference_logits(arch: Architecture, weights: Weights, ids: Tensor) -> Tensor:
    """Logits `[tokens, vocab]` of one document."""
    x = weights["embed_tokens.weight"][ids]
    if arch.embedding_scale is not None:
        x = x * arch.embedding_scale
    if arch.position_embedding == "learned":
        x = x + weights["embed_positions.weight"][torch.arange(len(ids))]
    for layer in range(arch.num_layers):
        x = _block(arch, weights, layer, x)
    head = weights["embed_tokens.weight"] if arch.tie_embeddings else weights["head.weight"]
    logits = _norm(arch, weights, "norm", x) @ head.T
    return logits if arch.final_softcap is None else arch.final_softcap * torch.tanh(logits / arch.final_softcap)


def reference_loss(arch: Architecture, weights: Weights, documents: list[list[int]]) -> Tensor:
    """Summed next-token loss of documents that know nothing of each other."""
    losses = []
    for document in documents:
        ids = torch.tensor(document)
        logits = reference_logits(arch, weights, ids)
        losses += [torch.logsumexp(row, 0) - row[label] for row, label in zip(logits[:-1], ids[1:], strict=True)]
    return torch.stack(losses).sum()


def _block(arch: Architecture, weights: Weights, layer: int, x: Tensor) -> Tensor:
    name = f"layers.{layer}"
    attended = _attention(arch, weights, layer, _norm(arch, weights, f"{name}.attention_norm", x))
    if arch.norm_placement == "sandwich":
        attended = _norm(arch, weights, f"{name}.post_attention_norm", attended)
    middle = x + attended
    fed = _mlp(arch, weights, name, _norm(arch, weights, f"{name}.mlp_norm", x if arch.parallel_residual else middle))
    if arch.norm_placement == "sandwich":
        fed = _norm(arch, weights, f"{name}.post_mlp_norm", fed)
    return middle + fed


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _rms(arch: Architecture, weight: Tensor, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + arch.norm_eps).sqrt() * (weight + 1 if arch.norm_offset else weight)


def _norm(arch: Architecture, weights: Weights, name: str, x: Tensor) -> Tensor:
    weight = weights[f"{name}.weight"]
    if arch.norm == "rmsnorm":
        return _rms(arch, weight, x)
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + arch.norm_eps).sqrt()
    return normed * (weight + 1 if arch.norm_offset else weight) + weights[f"{name}.bias"]


def _mlp(arch: Architecture, weights: Weights, name: str, x: Tensor) -> Tensor:
    up = _linear(weights, f"{name}.mlp.up_proj", x)
    z = _linear(weights, f"{name}.mlp.gate_proj", x) if arch.gated else up
    erf = z * (1 + torch.erf(z / math.sqrt(2))) / 2
    tanh = z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
    curve = {
        "swiglu": z / (1 + torch.exp(-z)),
        "geglu": erf,
        "geglu_tanh": tanh,
        "gelu": erf,
        "gelu_tanh": tanh,
        "relu2": F.relu(z) ** 2,
    }[arch.activation]
    return _linear(weights, f"{name}.mlp.down_proj", curve * up if arch.gated else curve)


def _attention(arch: Architecture, weights: Weights, layer: int, x: Tensor) -> Tensor:
    name, d, tokens = f"layers.{layer}.attention", arch.dims_per_head, len(x)
    q, k, v = (_linear(weights, f"{name}.{p}_proj", x) for p in "qkv")
    if arch.qk_norm == "projection":
        q, k = _rms(arch, weights[f"{name}.q_norm.weight"], q), _rms(arch, weights[f"{name}.k_norm.weight"], k)
    q, k, v = (t.reshape(tokens, -1, d) for t in (q, k, v))
    if arch.qk_norm == "head":
        q, k = _rms(arch, weights[f"{name}.q_norm.weight"], q), _rms(arch, weights[f"{name}.k_norm.weight"], k)
    if arch.clip_qkv is not None:
        q, k, v = (t.clamp(-arch.clip_qkv, arch.clip_qkv) for t in (q, k, v))
    if arch.position_embedding == "rope":
        q, k = _rotate_all(arch, layer, q), _rotate_all(arch, layer, k)
    group_size = arch.num_attention_heads // arch.groups
    rows = []
    for p in range(tokens):
        first = 0 if arch.window_of(layer) is None else max(0, p - arch.window_of(layer) + 1)  # type: ignore[operator]
        heads = []
        for h in range(arch.num_attention_heads):
            scores = arch.scale * (k[first : p + 1, h // group_size] @ q[p, h])
            if arch.attention_softcap is not None:
                scores = arch.attention_softcap * torch.tanh(scores / arch.attention_softcap)
            heads.append(torch.softmax(scores, 0) @ v[first : p + 1, h // group_size])
        rows.append(torch.cat(heads))
    return _linear(weights, f"{name}.o_proj", torch.stack(rows))


def _rotate_all(arch: Architecture, layer: int, x: Tensor) -> Tensor:
    config = arch.rope_of(layer)
    assert config.scaling is None or config.scaling.type not in ("yarn", "longrope")  # these have a temperature
    omegas = frequencies(config, arch.dims_per_head, arch.max_position_embeddings, len(x))
    rows = [[rotate(head, p, omegas, 1.0, config.interleaved) for head in token] for p, token in enumerate(x)]
    return torch.stack([torch.stack(row) for row in rows])


def naive_core(q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch, spec: AttentionSpec) -> Tensor:
    """An attention core document by document with full score matrices; padding gets zeros."""
    out = torch.zeros_like(q)
    for start, length in batch.spans:
        rows = slice(start, start + length)
        repeat = q.shape[1] // k.shape[1]
        keys, values = k[rows].repeat_interleave(repeat, 1), v[rows].repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        i = torch.arange(length)
        unseen = i[None, :] > i[:, None]
        if spec.window is not None:
            unseen = unseen | (i[None, :] <= i[:, None] - spec.window)
        probabilities = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", probabilities, values)
    return out
