"""The decoder as its definition says: one document, float64, every pair of tokens, full logits, plain operations.

It shares with the model the names of its parameters, the frequencies of RoPE and the hash that dropout is defined by;
no module, no attention code, no loss code. Gradients come from autograd.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from freight.config.architecture import Architecture
from freight.config.schema import AdapterConfig, TrainConfig
from freight.ops.batch import IGNORE_INDEX
from freight.ops.dropout import keep_mask
from freight.ops.rope import RopeSpec

See = Callable[[str, Tensor], None]
LORA = "default"


@dataclass(frozen=True)
class Placed:
    """A document where it stands.

    Args:
        ids: int64 `[tokens]`.
        labels: int64 `[tokens]`, the next token or `IGNORE_INDEX`.
        start: Number of its first token in the stream; what dropout counts by.
        drop: `(seed, step, microbatch)`; None = no dropout.
    """

    ids: Tensor
    labels: Tensor
    start: int
    drop: tuple[int, int, int] | None = None

    @property
    def numbers(self) -> Tensor:
        """int64 `[tokens]`: place of each in the stream."""
        return self.start + torch.arange(len(self.ids))


@dataclass(frozen=True)
class PlainDecoder:
    """A function of weights.

    Args:
        arch: The decoder.
        adapter: None = no adapter.
        weights: float64 by parameter name.
    """

    arch: Architecture
    adapter: AdapterConfig | None
    weights: Mapping[str, Tensor]

    def losses(self, document: Placed, train: TrainConfig, see: See) -> tuple[Tensor, Tensor]:
        """What is minimised and the negative log-likelihood, both `[tokens]`, 0 where there is no label."""
        logits = self._logits(document, see)
        lse = torch.log(torch.exp(logits - logits.amax(-1, keepdim=True)).sum(-1)) + logits.amax(-1)
        labelled = document.labels != IGNORE_INDEX
        target = logits[torch.arange(len(logits)), document.labels.clamp(min=0)]
        nll = lse - target
        smooth = lse - logits.mean(-1)
        objective = (1 - train.label_smoothing) * nll + train.label_smoothing * smooth
        if train.z_loss_coeff is not None:
            objective = objective + train.z_loss_coeff * lse**2
        return torch.where(labelled, objective, 0.0), torch.where(labelled, nll, 0.0)

    def _logits(self, document: Placed, see: See) -> Tensor:
        arch, weights = self.arch, self.weights
        x = weights["embed_tokens.weight"][document.ids]
        if arch.embedding_scale is not None:
            x = x * arch.embedding_scale
        if arch.position_embedding == "learned":
            x = x + weights["embed_positions.weight"][: len(x)]
        for layer in range(arch.num_layers):
            x = self._block(layer, x, document, see)
        head = weights["embed_tokens.weight"] if arch.tie_embeddings else weights["head.weight"]
        return _capped(self._norm("norm", x) @ head.T, arch.final_softcap)

    def _block(self, layer: int, x: Tensor, document: Placed, see: See) -> Tensor:
        name, sandwich = f"layers.{layer}", self.arch.norm_placement == "sandwich"
        see(f"{name}.input", x)
        attended = self._attention(layer, self._norm(f"{name}.attention_norm", x), document, see)
        if sandwich:
            attended = self._norm(f"{name}.post_attention_norm", attended)
        middle = x + attended
        fed = self._mlp(f"{name}.mlp", self._norm(f"{name}.mlp_norm", x if self.arch.parallel_residual else middle),
                        document)  # fmt: skip
        if sandwich:
            fed = self._norm(f"{name}.post_mlp_norm", fed)
        see(f"{name}.output", middle + fed)
        return middle + fed

    def _attention(self, layer: int, x: Tensor, document: Placed, see: See) -> Tensor:
        arch, name = self.arch, f"layers.{layer}.attention"
        q, k, v = (self._linear(f"{name}.{part}_proj", x, document) for part in "qkv")
        if arch.qk_norm == "projection":
            q, k = self._rms(f"{name}.q_norm", q), self._rms(f"{name}.k_norm", k)
        q, k, v = (t.reshape(len(x), -1, arch.dims_per_head) for t in (q, k, v))
        if arch.qk_norm == "head":
            q, k = self._rms(f"{name}.q_norm", q), self._rms(f"{name}.k_norm", k)
        if arch.clip_qkv is not None:
            q, k, v = (t.clamp(-arch.clip_qkv, arch.clip_qkv) for t in (q, k, v))
        if arch.position_embedding == "rope":
            q, k = self._rotated(layer, q), self._rotated(layer, k)
        for part, value in (("q", q), ("k", k), ("v", v)):
            see(f"{name}.{part}", value)
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = _capped(torch.einsum("qhd,khd->hqk", q, k) * arch.scale, arch.attention_softcap)
        place = torch.arange(len(x))
        seen = place[None, :] <= place[:, None]
        window = arch.window_of(layer)
        if window is not None:
            seen &= place[None, :] > place[:, None] - window
        probabilities = scores.masked_fill(~seen, -math.inf).softmax(-1) * self._pairs_kept(layer, document)
        context = torch.einsum("hqk,khd->qhd", probabilities, v)
        see(f"{name}.context", context)
        return self._linear(f"{name}.o_proj", context.flatten(1), document)

    def _pairs_kept(self, layer: int, document: Placed) -> Tensor:
        """Factors `[heads, queries, keys]` of attention dropout."""
        rate = self.arch.attention_dropout
        if not rate or document.drop is None:
            return torch.ones((), dtype=torch.float64)
        heads = torch.arange(self.arch.num_attention_heads)[:, None] << 32
        keep = keep_mask((*document.drop, layer), document.numbers + heads, document.numbers[None], rate)
        return keep.double() / (1 - rate)

    def _mlp(self, name: str, x: Tensor, document: Placed) -> Tensor:
        up = self._linear(f"{name}.up_proj", x, document)
        z = self._linear(f"{name}.gate_proj", x, document) if self.arch.gated else up
        curves = {
            "swiglu": lambda: z * torch.sigmoid(z),
            "geglu": lambda: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
            "geglu_tanh": lambda: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
            "gelu": lambda: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
            "gelu_tanh": lambda: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
            "relu2": lambda: F.relu(z) ** 2,
        }
        curve = curves[self.arch.activation]()
        return self._linear(f"{name}.down_proj", curve * up if self.arch.gated else curve, document)

    def _linear(self, name: str, x: Tensor, document: Placed) -> Tensor:
        weights, adapter = self.weights, self.adapter
        adapted = f"{name}.base_layer.weight" in weights
        base = f"{name}.base_layer" if adapted else name
        product = x @ weights[f"{base}.weight"].T
        y = product + weights[f"{base}.bias"] if f"{base}.bias" in weights else product
        if not adapted:
            return y
        assert adapter is not None
        a, b = weights[f"{name}.lora_A.{LORA}.weight"], weights[f"{name}.lora_B.{LORA}.weight"]
        scale = adapter.alpha / (math.sqrt(adapter.rank) if adapter.use_rslora else adapter.rank)
        update = (x * self._inputs_kept(name, document, x.shape[1])) @ a.T @ b.T * scale
        if not adapter.use_dora:
            return y + update
        lengths = torch.linalg.vector_norm(weights[f"{base}.weight"] + scale * b @ a, dim=1).detach()
        factor = weights[f"{name}.lora_magnitude_vector.{LORA}.weight"] / lengths
        return y + (factor - 1) * product + factor * update

    def _inputs_kept(self, name: str, document: Placed, features: int) -> Tensor:
        """Factors `[tokens, features]` of the adapter's dropout."""
        assert self.adapter is not None
        rate = self.adapter.dropout
        if not rate or document.drop is None:
            return torch.ones((), dtype=torch.float64)
        site = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        keep = keep_mask((*document.drop, site), document.numbers, torch.arange(features), rate)
        return keep.double() / (1 - rate)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if self.arch.norm == "rmsnorm":
            return self._rms(name, x)
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + self.arch.norm_eps)
        return normed * self._norm_weight(name) + self.weights[f"{name}.bias"]

    def _rms(self, name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + self.arch.norm_eps) * self._norm_weight(name)

    def _norm_weight(self, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return weight + 1 if self.arch.norm_offset else weight

    def _rotated(self, layer: int, x: Tensor) -> Tensor:
        """Queries or keys `[tokens, heads, head_dim]`, turned by their positions in the document."""
        arch, config = self.arch, self.arch.rope_of(layer)
        spec = RopeSpec.from_config(config, arch.dims_per_head, arch.max_position_embeddings)
        places = torch.arange(len(x))
        angles = places.double()[:, None] * spec.inverse_frequencies(torch.full_like(places, len(x)))
        turn = torch.polar(torch.full_like(angles, spec.attention_factor), angles)[:, None]
        rotated, rest = x[..., : spec.rotary_dim], x[..., spec.rotary_dim :]
        pairs = rotated.unflatten(-1, (-1, 2)) if config.interleaved else rotated.unflatten(-1, (2, -1)).mT
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        return torch.cat([(turned if config.interleaved else turned.mT).flatten(-2), rest], -1)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
