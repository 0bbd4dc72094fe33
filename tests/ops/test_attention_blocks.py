"""Every kernel against the definition, and the merge of partial results."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freight.ops.attention_backends import BACKENDS, Backend
from freight.ops.attention_blocks import PairDropout, block_backward, block_forward, merge
from freight.ops.attention_mask import ANTICAUSAL, CAUSAL, FULL, Mask, MaskKind, Segment
from freight.ops.dropout import keep_mask
from freight.verify.tolerances import difference
from tests.oracles.attention import attend, block_pairs, gradients

SEGMENTS = (Segment(0, 5, 0, 5), Segment(5, 10, 6, 11), Segment(11, 15, 12, 16))
MASKS = {
    "full": (FULL, 9, 13),
    "causal": (CAUSAL, 12, 12),
    "anticausal": (ANTICAUSAL, 12, 12),
    "window": (Mask(MaskKind.WINDOW, window=4, offset=3), 9, 12),
    "documents": (Mask(MaskKind.DOCUMENTS, inner=MaskKind.CAUSAL, segments=SEGMENTS), 16, 17),
    "one token": (CAUSAL, 1, 1),
}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def tensors(dtype: torch.dtype, tokens_q: int, tokens_k: int, heads: str, dim: int) -> list[Tensor]:
    query_heads, groups = HEADS[heads]
    generator = torch.Generator().manual_seed(tokens_q + dim)
    shapes = [
        (tokens_q, query_heads, dim),
        (tokens_k, groups, dim),
        (tokens_k, groups, dim),
        (tokens_q, query_heads, dim),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def check(backend: Backend, mask: Mask, inputs: list[Tensor], softcap: float | None = None) -> None:
    q, k, v, dout = inputs
    device, dtype = q.device, q.dtype
    out, lse = block_forward(q, k, v, mask, 0.2, softcap=softcap, backend=backend)
    grads = block_backward(dout, q, k, v, out, lse, mask, 0.2, softcap=softcap, backend=backend)
    wanted_inputs = tuple(x.double().cpu().requires_grad_() for x in (q, k, v))
    seen = block_pairs(mask, q.shape[0], k.shape[0])
    wanted, wanted_lse = attend(*wanted_inputs, seen, 0.2, softcap)
    assert out.dtype == dtype and lse.is_contiguous() and lse.device == device
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert difference(out.cpu(), wanted) <= TOLERANCE[dtype]
    hidden = ~seen.any(1)
    assert (lse.cpu()[:, hidden] == float("-inf")).all() and (out.cpu()[hidden] == 0).all()
    assert difference(lse.cpu()[:, ~hidden], wanted_lse[:, ~hidden]) <= TOLERANCE[dtype]
    for actual, expected in zip(grads, gradients(wanted, wanted_inputs, dout.double().cpu()), strict=True):
        assert actual.dtype == dtype
        assert difference(actual.cpu(), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [24, 64, 80])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("name", "mask"),
    [(name, mask) for name in ("math", "cpu_flash") for mask in MASKS if (name, mask) != ("cpu_flash", "window")],
)
def test_block_equals_definition(name: str, mask: str, heads: str, dim: int, dtype: torch.dtype) -> None:
    shape, tokens_q, tokens_k = MASKS[mask]
    check(BACKENDS[name], shape, tensors(dtype, tokens_q, tokens_k, heads, dim))


@pytest.mark.parametrize("mask", MASKS)
def test_softcap_equals_definition(mask: str) -> None:
    shape, tokens_q, tokens_k = MASKS[mask]
    check(BACKENDS["math"], shape, tensors(torch.float64, tokens_q, tokens_k, "gqa", 8), softcap=0.7)


@pytest.mark.parametrize("mask", [CAUSAL, ANTICAUSAL, Mask(MaskKind.WINDOW, window=300)])
def test_math_tiles_meet(mask: Mask) -> None:
    """More queries than one tile holds."""
    check(BACKENDS["math"], mask, tensors(torch.float64, 530, 530, "gqa", 8))


CUDA_CASES = [
    (name, mask, dtype)
    for name in ("math", "flash", "cudnn", "efficient")
    for mask, (shape, _, _) in MASKS.items()
    for dtype in (torch.float32, torch.bfloat16)
    if dtype in BACKENDS[name].dtypes and (shape.kind != MaskKind.WINDOW or BACKENDS[name].window)
]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [24, 64, 80, 44])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("name", "mask", "dtype"), CUDA_CASES)
def test_cuda_kernel_equals_definition(name: str, mask: str, dtype: torch.dtype, heads: str, dim: int) -> None:
    shape, tokens_q, tokens_k = MASKS[mask]
    check(BACKENDS[name], shape, [x.cuda() for x in tensors(dtype, tokens_q, tokens_k, heads, dim)])


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("mask", MASKS)
def test_flash_attn_package_equals_definition(mask: str, softcap: float | None) -> None:
    pytest.importorskip("flash_attn")
    shape, tokens_q, tokens_k = MASKS[mask]
    inputs = [x.cuda() for x in tensors(torch.bfloat16, tokens_q, tokens_k, "gqa", 64)]
    check(BACKENDS["flash_attn"], shape, inputs, softcap)


def test_score_100_at_cap_50() -> None:
    """Softcap and its slope: 48.201379, 0.070651."""
    q = torch.full((1, 1, 1), 100.0, dtype=torch.float64)
    k, v = torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64)
    _, lse = block_forward(q, k, v, FULL, 1.0, softcap=50.0)
    assert abs(lse.item() - 48.201379) < 1e-6
    # With p forced to 1 and out to 0, dq is the slope alone: ds = 1 * (1 - 0).
    dq, _, _ = block_backward(v, q, k, v, torch.zeros_like(q), lse, FULL, 1.0, softcap=50.0)
    assert abs(dq.item() - 0.070651) < 1e-6


def test_block_gradients_add_up_to_the_whole() -> None:
    """Two key blocks, the global out and lse."""
    q, k, v, dout = tensors(torch.float64, 8, 12, "gqa", 16)
    out, lse = block_forward(q, k, v, FULL, 0.3)
    whole = block_backward(dout, q, k, v, out, lse, FULL, 0.3)
    early = block_backward(dout, q, k[:5], v[:5], out, lse, FULL, 0.3)
    late = block_backward(dout, q, k[5:], v[5:], out, lse, FULL, 0.3)
    assert difference(early[0] + late[0], whole[0]) < 1e-12
    for i in (1, 2):
        assert difference(torch.cat([early[i], late[i]]), whole[i]) < 1e-12


def test_empty_ranges_never_reach_a_kernel() -> None:
    q, k, _, dout = tensors(torch.float32, 4, 4, "mha", 8)
    for queries, keys in ((q[:0], k), (q, k[:0])):
        out, lse = block_forward(queries, keys, keys, FULL, 1.0, backend=BACKENDS["cpu_flash"])
        assert out.shape == queries.shape and (out == 0).all() and (lse == float("-inf")).all()
        grads = block_backward(
            dout[: len(queries)], queries, keys, keys, out, lse, FULL, 1.0, backend=BACKENDS["cpu_flash"]
        )
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("name", ["math", "cpu_flash"])
def test_row_with_global_lse_minus_infinity_has_no_gradient(name: str) -> None:
    q, k, v, dout = tensors(torch.float64, 4, 4, "gqa", 8)
    lse = torch.full((4, 4), float("-inf"), dtype=torch.float64)
    grads = block_backward(dout, q, k, v, torch.zeros_like(q), lse, FULL, 1.0, backend=BACKENDS[name])
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("gap", [1e3, -1e3, 88.8, -88.8, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merge_of_distant_parts(gap: float, dtype: torch.dtype) -> None:
    out, other = torch.tensor([[1.0, 2.0]], dtype=dtype), torch.tensor([[3.0, 5.0]], dtype=dtype)
    merged, lse = merge(out, torch.tensor([gap], dtype=dtype), other, torch.zeros(1, dtype=dtype))
    weight = 1 / (1 + torch.exp(torch.tensor(gap, dtype=torch.float64)))
    assert torch.allclose(merged.double(), out.double() + (other - out).double() * weight, atol=1e-6)
    assert abs(lse.item() - max(gap, 0.0)) < 0.7
    if abs(gap) == 1e3:
        assert torch.equal(merged, other if gap < 0 else out) and lse.item() == max(gap, 0.0)


@pytest.mark.parametrize(("mine", "theirs"), itertools.product([0.5, float("-inf")], repeat=2))
def test_merge_with_rows_that_saw_nothing(mine: float, theirs: float) -> None:
    out, other = torch.tensor([[1.0]]), torch.tensor([[3.0]])
    merged, lse = merge(out, torch.tensor([mine]), other, torch.tensor([theirs]))
    assert merged.item() == {(0.5, 0.5): 2.0, (0.5, float("-inf")): 1.0}.get(
        (mine, theirs), 3.0 if theirs == 0.5 else 1.0
    )
    assert lse.item() == max(mine, theirs) or mine == theirs == 0.5


@settings(max_examples=40)
@given(cuts=st.sets(st.integers(1, 29), max_size=8), order=st.randoms(use_true_random=False))
def test_merge_of_any_split_in_any_order(cuts: set[int], order) -> None:
    q, k, v, _ = tensors(torch.float64, 3, 30, "gqa", 8)
    whole, whole_lse = block_forward(q, k, v, FULL, 2.0)
    ranges = list(itertools.pairwise([0, *sorted(cuts), 30]))
    order.shuffle(ranges)
    out, lse = torch.zeros_like(q), torch.full((3, 4), float("-inf"), dtype=torch.float64)
    for start, stop in ranges:
        part, part_lse = block_forward(q, k[start:stop], v[start:stop], FULL, 2.0)
        out, lse = merge(out, lse, part, part_lse.t())
    assert difference(out, whole) < 1e-13 and difference(lse.t(), whole_lse) < 1e-13


def test_dropout_equals_definition() -> None:
    q, k, v, dout = tensors(torch.float64, 20, 20, "gqa", 8)
    dropout = PairDropout(0.4, (3, 1, 4))
    heads = torch.arange(4).unsqueeze(1) << 32
    keep = keep_mask(dropout.seed_parts, heads + torch.arange(20), torch.arange(20), 0.4)
    inputs = tuple(x.clone().requires_grad_() for x in (q, k, v))
    wanted, _ = attend(*inputs, block_pairs(CAUSAL, 20, 20), 0.5, factors=keep.double() / 0.6)
    out, lse = block_forward(q, k, v, CAUSAL, 0.5, dropout=dropout)
    grads = block_backward(dout, q, k, v, out, lse, CAUSAL, 0.5, dropout=dropout)
    assert difference(out, wanted) < 1e-12
    for actual, expected in zip(grads, gradients(wanted, inputs, dout), strict=True):
        assert difference(actual, expected) < 1e-12
