"""FLOPs against parameters of the real model and pairs counted one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from freight.config.adapter_targets import AdapterTargets
from freight.config.architecture import Architecture
from freight.config.schema import AdapterConfig
from freight.nn.decoder import Decoder
from freight.ops.attention_plan import document_pairs
from freight.train.flops import (
    body_parameters,
    device_peak,
    head_parameters,
    measured_gemm_rate,
    peak_memory_bytes,
    step_flops,
    table_peak,
    total_parameters,
    trained_part,
)
from tests.nn.small_decoders import SMALL, VARIANTS


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_parameters_are_those_of_the_model(changes: dict[str, Any]) -> None:
    arch = Architecture.model_validate(SMALL | changes)
    with torch.device("meta"):
        model = Decoder(arch)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert total_parameters(arch) == sum(sizes.values())
    outside = sum(
        size for name, size in sizes.items() if name.split(".")[0] in ("embed_tokens", "embed_positions", "head")
    )
    assert body_parameters(arch) == sum(sizes.values()) - outside
    assert head_parameters(arch) == sizes["embed_tokens.weight"]


@given(st.integers(1, 40), st.none() | st.integers(1, 45))
def test_pairs_are_counted_one_by_one(length: int, window: int | None) -> None:
    seen = [(q, k) for q in range(length) for k in range(q + 1) if window is None or q - k < window]
    assert document_pairs(length, window=window) == len(seen)


def test_step_counts_documents_apart_and_windows_per_layer() -> None:
    layers = ("sliding_attention", "full_attention")
    arch = Architecture.model_validate(SMALL | dict(sliding_window=2, layer_types=layers, head_dim=8))
    weights = body_parameters(arch) + head_parameters(arch)
    pairs = (6 + 15) + (1 + 2 * 2 + 1 + 2 * 4)  # full: 3 and 5 tokens; window 2: 1, 2, 2 and 1, 2, 2, 2, 2
    flops = step_flops(arch, [3, 5], label_tokens=2, repeated=7.0)
    assert flops.model == 6 * weights * 8 + 12 * 4 * 8 * pairs
    assert flops.executed == flops.model - 6 * head_parameters(arch) * 6 + 7.0
    assert step_flops(arch, [3, 5]).executed == flops.model


def test_formula_is_what_matrix_products_cost() -> None:
    """Forward and backward of the linears of one block, counted by torch: norms are all that the formula adds."""
    arch = Architecture.model_validate(SMALL | dict(num_query_groups=2))
    shapes = [(16, 16), (8, 16), (8, 16), (16, 16), (24, 16), (24, 16), (16, 24)]
    tokens = 5
    with FlopCounterMode(display=False) as counter:
        for rows, columns in shapes:
            x = torch.randn(tokens, columns, requires_grad=True)
            (x @ torch.randn(rows, columns, requires_grad=True).t()).sum().backward()
    norms = 2 * arch.num_layers + 1
    assert 6 * (body_parameters(arch) - norms * 16) * tokens == arch.num_layers * counter.get_total_flops()


def test_an_adapter_costs_what_its_matrix_products_cost() -> None:
    """Torch counts the linears of two blocks and the head, A and B of two modules; norms and pairs are added."""
    arch = Architecture.model_validate(SMALL | dict(num_query_groups=2, tie_embeddings=False))
    adapted = AdapterTargets(("layers.1.attention.q_proj", "layers.1.mlp.up_proj"))
    trained = trained_part(arch, AdapterConfig(rank=3), adapted)
    assert (trained.added, trained.body, trained.head, trained.first_layer) == (3 * (16 + 16 + 24 + 16), 0, False, 1)
    shapes = [(16, 16), (8, 16), (8, 16), (16, 16), (24, 16), (24, 16), (16, 24)]
    tokens = 5
    with FlopCounterMode(display=False) as counter:
        for layer, rows, columns in [(layer, *shape) for layer in (0, 1) for shape in shapes]:
            x = torch.randn(tokens, columns, requires_grad=layer == 1)
            product = x @ torch.randn(rows, columns).t()
            if product.requires_grad:
                product.sum().backward()
        x = torch.randn(tokens, 16, requires_grad=True)
        (x @ torch.randn(arch.vocab_size, 16).t()).sum().backward()
        for rows, columns in ((3, 16), (16, 3), (3, 16), (24, 3)):
            x = torch.randn(tokens, columns, requires_grad=True)
            (x @ torch.randn(rows, columns, requires_grad=True).t()).sum().backward()
    norms = (2 * 16 * 2 + (2 + 1) * 16 * 4) * tokens  # below the first trained layer 2 per weight, from there on 4
    pairs = 15 * arch.num_attention_heads * arch.dims_per_head * (4 + 12)
    assert step_flops(arch, [tokens], trained=trained).model == counter.get_total_flops() + norms + pairs


def test_embeddings_in_full_need_gradients_everywhere() -> None:
    arch = Architecture.model_validate(SMALL | dict(tie_embeddings=True))
    trained = trained_part(arch, AdapterConfig(), AdapterTargets(("layers.1.mlp.up_proj",), ("embed_tokens", "norm")))
    assert (trained.head, trained.first_layer, trained.body) == (True, 0, 16)
    assert trained_part(arch, None, None).body == body_parameters(arch)


def test_peaks_and_memory_are_measured() -> None:
    assert measured_gemm_rate(torch.float32, seconds=0.0, size=64) > 1e6
    peak = device_peak(torch.device("cpu"), torch.bfloat16, seconds=0.0)
    assert peak is not None
    assert peak.source == "bfloat16 GEMM rate measured at start"
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(before // 4 + 8 * 2**20)
    assert peak_memory_bytes(torch.device("cpu")) >= before
    assert before > block.element_size()


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_a_device_is_known_by_whole_words(name: str, peak: float | None) -> None:
    assert table_peak(name) == peak
