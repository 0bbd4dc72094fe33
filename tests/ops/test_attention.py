"""Attention over packed streams: right values, strict isolation, nothing at padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freight.errors import ConfigError
from freight.ops.attention import BlockAttention, LocalAttention
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec
from freight.verify.tolerances import difference
from tests.oracles.attention import attend_batch, gradients

CPU_BACKENDS = ["auto", "math", "cpu_flash"]


def batch_of(lengths: list[int], padding: int = 0, **fields: int) -> TokenBatch:
    return TokenBatch.from_documents([[0] * n for n in lengths], pad_to=sum(lengths) + padding, **fields)


def inputs_of(batch: TokenBatch, dtype: torch.dtype = torch.float64, heads: int = 4, groups: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch.tokens)
    shapes = [(batch.tokens, n, 8) for n in (heads, groups, groups)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def running_mean(documents: list[list[int]], pad_to: int, backend: str, window: int | None = None) -> list[float]:
    """With q = k = 0 and v = token id, attention is the mean of what a token sees."""
    batch = TokenBatch.from_documents(documents, pad_to=pad_to)
    zeros = torch.zeros(batch.tokens, 1, 8, dtype=torch.float64)
    values = batch.input_ids.double().view(-1, 1, 1).expand(-1, 1, 8).contiguous()
    context = LocalAttention(backend)(zeros, zeros, values, batch, AttentionSpec(scale=1.0, window=window))
    return context[:, 0, 0].tolist()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_documents_do_not_see_each_other(backend: str) -> None:
    """Documents see each other: exact running means, 0 at padding."""
    mean = running_mean([[1, 2, 3], [4, 5, 6, 7, 8]], 10, backend)
    assert mean == pytest.approx([1, 1.5, 2, 4, 4.5, 5, 5.5, 6, 0, 0], abs=1e-12)
    assert mean[8:] == [0, 0]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_end_of_turn_is_no_border(backend: str) -> None:
    """End of turn taken for end of document: 7 attends to 1 and 5 across the eos between them."""
    mean = running_mean([[1, 5, 2, 6, 7], [1, 8]], 7, backend)
    assert mean == pytest.approx([1, 3, 8 / 3, 3.5, 4.2, 1, 4.5], abs=1e-12)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_sliding_window_counts_the_token_itself(backend: str) -> None:
    """Sliding window of 3, within documents only."""
    mean = running_mean([[1, 2, 3], [4, 5, 6, 7, 8]], 8, backend, window=3)
    assert mean == pytest.approx([1, 1.5, 2, 4, 4.5, 5, 6, 7], abs=1e-12)
    assert running_mean([[1, 2, 3, 4]], 4, backend, window=1) == pytest.approx([1, 2, 3, 4], abs=1e-12)
    for window in (5, 9, None):
        full = running_mean([[1, 2, 3, 4, 5]], 5, backend, window=window)
        assert full == pytest.approx([1, 1.5, 2, 2.5, 3], abs=1e-12)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    padding=st.integers(0, 4),
    window=st.none() | st.integers(1, 8),
    causal=st.booleans(),
    softcap=st.none() | st.just(2.0),
    groups=st.sampled_from([1, 2, 4]),
    backend=st.sampled_from(["auto", "math"]),
)
def test_attention_equals_definition(
    lengths: list[int],
    padding: int,
    window: int | None,
    causal: bool,
    softcap: float | None,
    groups: int,
    backend: str,
) -> None:
    batch = batch_of(lengths, padding)
    spec = AttentionSpec(scale=0.4, window=window if causal else None, softcap=softcap, causal=causal)
    inputs = inputs_of(batch, groups=groups)
    dout = torch.randn(batch.tokens, 4, 8, dtype=torch.float64)
    context, wanted = LocalAttention(backend)(*inputs, batch, spec), attend_batch(*inputs, batch, spec)
    assert difference(context, wanted) < 1e-12
    for actual, expected in zip(
        gradients(context, tuple(inputs), dout), gradients(wanted, tuple(inputs), dout), strict=True
    ):
        assert difference(actual, expected) < 1e-12
        assert (actual[~batch.valid] == 0).all(), "padding has no gradient"
    assert (context[~batch.valid] == 0).all(), "padding has no context"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 6])
def test_lower_precisions(dtype: torch.dtype, window: int | None) -> None:
    batch = batch_of([17, 17, 5, 40, 39], 3)
    spec = AttentionSpec(scale=0.4, window=window)
    inputs = inputs_of(batch, dtype)
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    dout = torch.randn(batch.tokens, 4, 8).to(dtype)
    context, wanted = LocalAttention()(*inputs, batch, spec), attend_batch(*exact, batch, spec)
    assert context.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    assert difference(context, wanted) < tolerance
    for actual, expected in zip(
        gradients(context, tuple(inputs), dout), gradients(wanted, exact, dout.double()), strict=True
    ):
        assert actual.dtype == dtype and difference(actual, expected) < tolerance


LENGTHS = [9, 9, 30, 4, 29, 9, 28]


@pytest.mark.parametrize("backend", ["auto", "math"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [1, 2, 4])
def test_one_document_moves_no_other_by_a_bit(
    changed: int, dtype: torch.dtype, window: int | None, backend: str
) -> None:
    batch = batch_of(LENGTHS, 2)
    spec, core = AttentionSpec(scale=0.4, window=window), LocalAttention(backend)
    start, length = batch.spans[changed]
    others = torch.ones(batch.tokens, dtype=torch.bool)
    others[start : start + length] = False
    dout = torch.randn(batch.tokens, 4, 8).to(dtype)
    results = []
    for factor in (1.0, -3.0):
        inputs = [x.detach().clone() for x in inputs_of(batch, dtype)]
        for x in inputs:
            x[~others] *= factor
            x.requires_grad_()
        context = core(*inputs, batch, spec)
        results.append(
            [
                context,
                *gradients(context, tuple(inputs), dout * torch.where(others, 1, factor).view(-1, 1, 1).to(dtype)),
            ]
        )
    for first, second in zip(*results, strict=True):
        assert torch.equal(first[others], second[others])
        assert not torch.equal(first[~others], second[~others])


def test_packed_equals_alone() -> None:
    packed = batch_of(LENGTHS)
    inputs = inputs_of(packed)
    context = LocalAttention()(*inputs, packed, AttentionSpec(scale=0.4))
    for start, length in packed.spans:
        alone = [x[start : start + length] for x in inputs]
        wanted = LocalAttention()(*alone, batch_of([length]), AttentionSpec(scale=0.4))
        assert difference(context[start : start + length], wanted) < 1e-13


def test_rows_without_keys() -> None:
    """Padding in front of and inside the stream, and a batch of nothing but padding: zeros and never NaN."""
    ids = torch.zeros(8, dtype=torch.int64)
    batch = TokenBatch(ids, ids - 100, ids, cu_seqlens=(0, 2, 6, 8), lengths=(0, 3, 2))
    inputs = inputs_of(batch, groups=2)
    context = LocalAttention()(*inputs, batch, AttentionSpec(scale=0.4))
    assert difference(context, attend_batch(*inputs, batch, AttentionSpec(scale=0.4))) < 1e-12
    grads = gradients(
        context, tuple(inputs), torch.full_like(context, float("nan")).where(batch.valid.view(-1, 1, 1), 1.0)
    )
    assert (context[[0, 1, 5]] == 0).all() and all((grad[[0, 1, 5]] == 0).all() for grad in grads)

    filler = TokenBatch(ids, ids - 100, ids, cu_seqlens=(0, 8), lengths=(0,))
    context = LocalAttention()(*inputs, filler, AttentionSpec(scale=0.4, window=3))
    assert (context == 0).all()
    assert all((grad == 0).all() for grad in gradients(context, tuple(inputs), torch.ones_like(context)))


def test_filled_up_rows_add_nothing() -> None:
    """Lengths 40 and 39 share a batch: the row that fills up the second must add nothing to any key."""
    batch = batch_of([40, 39], 1)
    inputs, spec = tuple(inputs_of(batch)), AttentionSpec(scale=0.4)
    assert len(LocalAttention().schedule_of(*inputs[:2], batch, spec).plan.entries) == 1
    context, wanted = LocalAttention()(*inputs, batch, spec), attend_batch(*inputs, batch, spec)
    dout = torch.randn_like(context)
    dout[~batch.valid] = 1e6
    for actual, expected in zip(gradients(context, inputs, dout), gradients(wanted, inputs, dout), strict=True):
        assert difference(actual, expected) < 1e-12


def test_dropout_is_a_function_of_position() -> None:
    batch = batch_of([12, 20], seed=1, step=2, microbatch=3)
    spec = AttentionSpec(scale=0.4, dropout=0.5, layer=1)
    inputs = inputs_of(batch)
    first, second = (LocalAttention()(*inputs, batch, spec) for _ in range(2))
    assert torch.equal(first, second)
    for other in (AttentionSpec(scale=0.4, dropout=0.5, layer=2), AttentionSpec(scale=0.4)):
        assert not torch.equal(first, LocalAttention()(*inputs, batch, other))
    assert not torch.equal(first, LocalAttention()(*inputs, batch_of([12, 20], seed=1, step=3, microbatch=3), spec))
    # The mean over many masks is attention without dropout.
    total = sum(LocalAttention()(*inputs, batch_of([12, 20], seed=seed), spec).detach() for seed in range(150))
    plain = LocalAttention()(*inputs, batch, AttentionSpec(scale=0.4))
    assert difference(total / 150, plain) < 0.4


def test_layers_share_one_schedule() -> None:
    batch = batch_of([5, 7])
    core, inputs = LocalAttention(), inputs_of(batch)
    schedules = [core.schedule_of(*inputs[:2], batch, AttentionSpec(scale=0.4, layer=layer)) for layer in range(30)]
    assert all(schedule is schedules[0] for schedule in schedules)
    assert core.schedule_of(*inputs[:2], batch, AttentionSpec(scale=0.4, window=2)) is not schedules[0]


def test_no_second_derivative_and_none_of_lse() -> None:
    batch = batch_of([5])
    inputs = inputs_of(batch)
    schedule = LocalAttention().schedule_of(*inputs[:2], batch, AttentionSpec(scale=0.4))
    context, lse = BlockAttention.apply(*inputs, schedule, None)
    assert not lse.requires_grad
    grad = torch.autograd.grad(context.sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_saved_tensors_pass_through_hooks() -> None:
    """q, k, v, out and lse are all that is kept, where recompute and offload can see it."""
    batch = batch_of([5, 3])
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        LocalAttention()(*inputs_of(batch), batch, AttentionSpec(scale=0.4))
    assert sorted(kept) == sorted([(8, 4, 8), (8, 2, 8), (8, 2, 8), (8, 4, 8), (4, 8)])


def test_softcap_is_never_dropped() -> None:
    """A backend without softcap is refused, never run uncapped."""
    batch = batch_of([5])
    with pytest.raises(ConfigError, match="has no softcap"):
        LocalAttention("cpu_flash")(*inputs_of(batch), batch, AttentionSpec(scale=0.4, softcap=30.0))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("backend", ["auto", "math", "flash", "efficient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_equals_definition(dtype: torch.dtype, backend: str, window: int | None) -> None:
    batch = batch_of([17, 17, 5, 40, 39], 3)
    spec = AttentionSpec(scale=0.4, window=window)
    inputs = [x.detach().cuda().requires_grad_() for x in inputs_of(batch, dtype)]
    exact = tuple(x.detach().double().cpu().requires_grad_() for x in inputs)
    dout = torch.randn(batch.tokens, 4, 8).to(dtype)
    context, wanted = LocalAttention(backend)(*inputs, batch.to("cuda"), spec), attend_batch(*exact, batch, spec)
    assert difference(context.cpu(), wanted) < 2e-2
    grads = gradients(context, tuple(inputs), dout.cuda())
    for actual, expected in zip(grads, gradients(wanted, exact, dout.double()), strict=True):
        assert difference(actual.cpu(), expected) < 2e-2
