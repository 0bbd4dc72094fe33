"""Model FLOPs of a step, and the peak they are divided by.

    model FLOPs = tokens * 6 N  +  pairs * 12 * heads * head_dim  (summed over layers)

N counts every weight but the embedding tables, whose lookup multiplies nothing; the head counts, also when it shares
the embedding's weight. A pair is a (query, key) of one document that attention may look at: causal, inside the window.
Forward is a third of both terms, backward two thirds.

Of a frozen weight no gradient is computed: it counts 4 N, and 2 N below the first trained layer, where no gradient
flows either (nor through attention). An adapter's A and B count 6 N. So MFU stays the share of the work that learning
needs, and a LoRA step of the same speed in tokens shows a lower one than full fine-tuning.

`perf/mfu` divides model FLOPs by the peak. `perf/hfu` divides what was executed: the head only for tokens that have a
label, since the loss computes no other row, plus what recompute repeats.

The peak of a CUDA device is its table value. A CPU has none worth quoting (clock, cores and instruction sets vary), so
the rate of one large GEMM is measured at start, through the very `linear` that the model uses: 0.3 seconds.
Source: Chowdhery et al. 2022 (PaLM), appendix B.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from freight.config.adapter_targets import AdapterTargets
from freight.config.architecture import Architecture
from freight.config.schema import AdapterConfig
from freight.nn.decoder import Decoder
from freight.ops.attention_plan import document_pairs
from freight.ops.linear import linear

FORMULA = (
    "model FLOPs = 6 N per token (every weight but the embedding tables, head included) "
    "+ 12 x heads x head_dim per layer and causal pair of a document; frozen weights count 4 N, or 2 N below the first "
    "trained layer; "
    "peak = the device's table value, or on CPU the GEMM rate measured at start"
)

# Dense bf16 peaks in FLOP/s, without sparsity. Source: NVIDIA data sheets of each device.
BF16_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}

GEMM_SIZE = 1024


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of forward and backward over some tokens.

    Args:
        model: What the formula counts; the numerator of MFU.
        executed: What the hardware did; the numerator of HFU.
    """

    model: float
    executed: float


@dataclass(frozen=True)
class Peak:
    """The rate that utilisation is measured against.

    Args:
        flops_per_second: Of one device.
        source: Where the number comes from, in words.
    """

    flops_per_second: float
    source: str


def body_parameters(arch: Architecture) -> int:
    """Weights of all blocks and the final norm: everything but embeddings and head."""
    hidden, heads, groups, dim = arch.hidden_size, arch.num_attention_heads, arch.groups, arch.dims_per_head
    attention = hidden * dim * (2 * heads + 2 * groups)
    if arch.attention_bias:
        attention += dim * (heads + 2 * groups)
    if arch.attention_bias is True:
        attention += hidden
    if arch.qk_norm == "head":
        attention += 2 * dim
    elif arch.qk_norm == "projection":
        attention += dim * (heads + groups)
    projections_up = 2 if arch.gated else 1
    mlp = (projections_up + 1) * hidden * arch.ffn_hidden_size
    if arch.mlp_bias:
        mlp += projections_up * arch.ffn_hidden_size + hidden
    norm = _norm_parameters(arch)
    norms_per_block = 4 if arch.norm_placement == "sandwich" else 2
    return arch.num_layers * (attention + mlp + norms_per_block * norm) + norm


def _norm_parameters(arch: Architecture) -> int:
    return arch.hidden_size * (2 if arch.norm == "layernorm" else 1)


def head_parameters(arch: Architecture) -> int:
    """Weights of the head, its own or the embedding's."""
    return arch.vocab_size * arch.hidden_size


def total_parameters(arch: Architecture) -> int:
    """Every weight once: blocks, final norm, embeddings, and the head if it has a weight of its own."""
    tables = arch.vocab_size + (arch.max_position_embeddings if arch.position_embedding == "learned" else 0)
    return body_parameters(arch) + tables * arch.hidden_size + (0 if arch.tie_embeddings else head_parameters(arch))


@dataclass(frozen=True)
class Trained:
    """What is trained of a model.

    Args:
        added: Weights of an adapter's A and B, which multiply every token beside the model's own.
        body: Trained weights of blocks and final norm.
        head: The head's weight is trained.
        first_layer: No gradient is needed in the blocks below it.
    """

    added: int
    body: int
    head: bool
    first_layer: int


def trained_part(arch: Architecture, adapter: AdapterConfig | None, adapted: AdapterTargets | None) -> Trained:
    """What a configuration trains: everything, or an adapter and the modules it names in full."""
    if adapter is None or adapted is None:
        return Trained(0, body_parameters(arch), head=True, first_layer=0)
    with torch.device("meta"):
        parameters = {name: parameter.shape for name, parameter in Decoder(arch).named_parameters()}
    full = {name: shape.numel() for name, shape in parameters.items() if name.rpartition(".")[0] in adapted.full}
    tables = [name for name in full if name.startswith("embed_")]
    layers = [int(name.split(".")[1]) for name in (*adapted.lora, *full) if name.startswith("layers.")]
    return Trained(
        added=sum(adapter.rank * sum(parameters[f"{module}.weight"]) for module in adapted.lora),
        body=sum(size for name, size in full.items() if not name.startswith(("embed_", "head."))),
        head="head" in adapted.full or (arch.tie_embeddings and "embed_tokens" in adapted.full),
        first_layer=0 if tables else min(layers, default=arch.num_layers),
    )


def step_flops(
    arch: Architecture,
    lengths: Iterable[int],
    *,
    label_tokens: int | None = None,
    repeated: float = 0.0,
    trained: Trained | None = None,
) -> StepFlops:
    """FLOPs of forward and backward over documents of these lengths.

    Args:
        arch: The model.
        lengths: Real tokens of every document (or piece) of the step; padding costs the formula nothing.
        label_tokens: Tokens with a label; all of them by default.
        repeated: FLOPs that recompute adds.
        trained: What has gradients; everything by default.
    """
    documents = list(lengths)
    tokens = sum(documents)
    trained = trained or trained_part(arch, None, None)
    windows = [arch.window_of(layer) for layer in range(arch.num_layers)]
    pairs_of = {w: sum(document_pairs(n, window=w) for n in documents) for w in set(windows)}
    forward_pairs = sum(pairs_of[w] for w in windows)
    backward_pairs = sum(pairs_of[w] for w in windows[trained.first_layer :])
    width = arch.num_attention_heads * arch.dims_per_head
    whole = body_parameters(arch)
    below = (whole - _norm_parameters(arch)) // arch.num_layers * trained.first_layer
    per_token = 2.0 * (whole + trained.added) + 2.0 * (whole - below + trained.added)  # outputs, input gradients
    per_token += 2.0 * (trained.body + trained.added)  # weight gradients
    body = per_token * tokens + 4.0 * width * forward_pairs + 8.0 * width * backward_pairs
    head_per_token = (6.0 if trained.head else 4.0) * head_parameters(arch)
    return StepFlops(
        model=body + head_per_token * tokens,
        executed=body + head_per_token * (tokens if label_tokens is None else label_tokens) + repeated,
    )


def device_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.3) -> Peak | None:
    """Peak rate of one device, or None for a CUDA device that the table does not know.

    Args:
        device: Where the model computes.
        dtype: What its GEMMs compute in.
        seconds: Time spent measuring, on CPU.
    """
    if device.type == "cpu":
        rate = measured_gemm_rate(dtype, seconds=seconds)
        return Peak(rate, f"{str(dtype).removeprefix('torch.')} GEMM rate measured at start")
    name = torch.cuda.get_device_name(device)
    known = table_peak(name)
    if known is None or dtype not in (torch.bfloat16, torch.float16):
        return None
    return Peak(known, f"table value of {name}")


def table_peak(name: str) -> float | None:
    """The table's value for a device by the words of its name: an A10G is no A10, and an RTX A1000 no A100."""
    words = f" {name.replace('-', ' ')} "
    return next((peak for key, peak in BF16_PEAKS.items() if f" {key} " in words), None)


def measured_gemm_rate(dtype: torch.dtype, *, seconds: float = 0.3, size: int = GEMM_SIZE) -> float:
    """FLOP/s of the fastest `[size, size] x [size, size]` product seen within some seconds, on CPU.

    The fastest, because whatever slows a single call down is not the machine's peak.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, size, generator=generator).to(dtype)
    weight = torch.randn(size, size, generator=generator).to(dtype)
    best = float("inf")
    with torch.no_grad():
        stop = time.perf_counter() + seconds
        while True:
            start = time.perf_counter()
            linear(inputs, weight, None)
            end = time.perf_counter()
            best = min(best, end - start)
            if end > stop:
                return 2.0 * size**3 / best


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory so far: allocated on a CUDA device, resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far.

    Linux tells it per process image in /proc; `getrusage` elsewhere, whose unit is bytes on macOS.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # noqa: PLC0415 - not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
