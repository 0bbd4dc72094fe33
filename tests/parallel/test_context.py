"""Context parallelism gives what one process gives: output and every gradient, for every method."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freight.ops.protocols import AttentionSpec
from freight.verify.ranks import RankPool
from freight.verify.tolerances import difference
from tests.parallel.context_tasks import Case, attend, plain, ring_messages, running_mean, shapes_on_many_ranks

METHODS = ["ring", "ring contiguous", "all_gather", "all_gather contiguous", "ulysses"]


def methods_of(world: int) -> list[str]:
    return [*METHODS, "hybrid"] if world == 4 else METHODS


def variants(methods: list[str]) -> list[Case]:
    """One of every kind of stream, heads, mask and switch, for each method."""
    cases = []
    for method in methods:
        of_method = [
            Case(method),
            Case(method, lengths=(30,), padding=0),
            Case(method, lengths=(31,), padding=3, groups=8),
            Case(method, lengths=(3, 1, 2, 1, 20), groups=1),
            Case(method, groups=2),
            Case(method, heads=12, groups=3),
            Case(method, heads=9, groups=3, portions=3),
            Case(method, spec=AttentionSpec(scale=0.4, window=4)),
            Case(method, lengths=(40,), padding=1, spec=AttentionSpec(scale=0.4, window=11)),
            Case(method, spec=AttentionSpec(scale=0.4, softcap=2.0)),
            Case(method, spec=AttentionSpec(scale=0.4, dropout=0.3, layer=2)),
            Case(method, lengths=(17, 8), heads=12, groups=3, spec=AttentionSpec(scale=0.4, dropout=0.3, window=6)),
            Case(method, spec=AttentionSpec(scale=0.4, causal=False)),
            Case(method, backend="math"),
            Case(method, lengths=(4, 4, 4, 4), padding=0),
            Case(method, lengths=(1,), padding=0),
        ]
        cases += of_method[::3] if "contiguous" in method else of_method
    return cases


def check(cases: list[Case], results: list[list[torch.Tensor]]) -> None:
    for case, parts in zip(cases, results, strict=True):
        padding = ~case.batch().valid
        for name, actual, wanted in zip(("context", "dq", "dk", "dv"), parts, plain(case), strict=True):
            assert difference(actual, wanted) < 1e-12, f"{name} of {case}"
            assert (actual[padding] == 0).all(), f"{name} at padding of {case}"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_method_equals_one_process(ranks: RankPool, world: int) -> None:
    cases = variants(methods_of(world) if world != 3 else ["ring", "all_gather", "ulysses"])
    for results in ranks.run(attend, world, cases):
        check(cases, results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions(ranks: RankPool, dtype: torch.dtype) -> None:
    cases = [Case(method, dtype=dtype, groups=2) for method in methods_of(4)]
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    for results in ranks.run(attend, 4, cases):
        for case, parts in zip(cases, results, strict=True):
            wanted = plain(replace(case, dtype=torch.float64))
            for name, actual, exact in zip(("context", "dq", "dk", "dv"), parts, wanted, strict=True):
                assert actual.dtype == dtype and difference(actual, exact) < tolerance, f"{name} of {case}"


@pytest.mark.parametrize("world", [2, 4])
def test_waiting_at_once_gives_the_same_bits(ranks: RankPool, world: int) -> None:
    specs = [AttentionSpec(scale=0.4), AttentionSpec(scale=0.4, window=5)]
    shapes = [dict(groups=4), dict(heads=12, groups=3), dict(groups=1, dtype=torch.bfloat16)]
    cases = [Case(m, spec=spec, **shape) for m in methods_of(world) for spec in specs for shape in shapes]
    overlapped, at_once = (
        ranks.run(attend, world, [replace(case, overlap=overlap) for case in cases]) for overlap in (True, False)
    )
    for of_rank in zip(overlapped, at_once, strict=True):
        for case, first, second in zip(cases, *of_rank, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), case


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_document_moves_no_other_by_a_bit(ranks: RankPool, dtype: torch.dtype) -> None:
    specs = [AttentionSpec(scale=0.4), AttentionSpec(scale=0.4, window=5)]
    cases = [Case(m, spec=spec, dtype=dtype, groups=2) for m in methods_of(4) for spec in specs]
    changed = [replace(case, changed=1) for case in cases]
    (results, *_), (others, *_) = ranks.run(attend, 4, cases), ranks.run(attend, 4, changed)
    for case, first, second in zip(cases, results, others, strict=True):
        start, length = case.batch().spans[1]
        kept = torch.ones(first[0].shape[0], dtype=torch.bool)
        kept[start : start + length] = False
        for x, y in zip(first, second, strict=True):
            assert torch.equal(x[kept], y[kept]) and not torch.equal(x[~kept], y[~kept]), case


@pytest.mark.parametrize("world", [2, 4])
def test_documents_and_windows_by_the_numbers(ranks: RankPool, world: int) -> None:
    """Running means of documents 1..3 and 4..8, whole and with a window of 3; 0 at padding."""
    whole = [1, 1.5, 2, 4, 4.5, 5, 5.5, 6, 0, 0]
    windowed = [1, 1.5, 2, 4, 4.5, 5, 6, 7, 0, 0]
    methods = methods_of(world)
    for means in ranks.run(running_mean, world, methods, [None, 3, 9]):
        for method, of_method in zip(methods, means, strict=True):
            for mean, wanted in zip(of_method, (whole, windowed, whole), strict=True):
                assert mean == pytest.approx(wanted, abs=1e-12), method


@pytest.mark.parametrize("world", [8, 16])
def test_shapes_and_splits_on_many_ranks(ranks: RankPool, world: int) -> None:
    """What one rank sends another is what that one expects, with uneven heads and fewer key-value heads than ranks."""
    shapes = [dict(heads=32, groups=8), dict(heads=20, groups=5), dict(heads=16, groups=1)]
    cases = [Case(m, lengths=(40, 3), padding=2, **shape) for m in [*METHODS, "hybrid"] for shape in shapes]
    (traffic,) = ranks.run(shapes_on_many_ranks, 1, world, cases)
    for case, of_ranks in zip(cases, traffic, strict=True):
        row = len(of_ranks[0][0])
        assert row == {"ulysses": world, "hybrid": 4}.get(case.method, 1)
        for rank, (sent, _) in enumerate(of_ranks):
            first = rank - rank % row
            assert sent == [of_ranks[first + other][1][rank % row] for other in range(row)], case


def test_blocks_that_nobody_needs_are_not_sent(ranks: RankPool) -> None:
    """Four ranks: keys pass on three times forward and back, their gradients from the second rank on, and then home."""
    window = AttentionSpec(scale=0.4, window=5)
    cases = [
        Case("ring", lengths=(40,), padding=0),
        Case("ring contiguous", lengths=(40,), padding=0),
        Case("ring contiguous", lengths=(40,), padding=0, spec=window),
        Case("ring contiguous", lengths=(10, 10, 10, 10), padding=0),
    ]
    all_steps, towards_the_end, one_step, none = zip(*ranks.run(ring_messages, 4, cases), strict=True)
    assert all_steps == (9, 9, 9, 9)
    assert sum(towards_the_end) == 3 * (3 + 2 + 1)
    assert one_step == (2, 3, 3, 1)
    assert none == (0, 0, 0, 0)
