"""Context parallelism gives what one process gives: output and every gradient, for every method."""

from __future__ import annotations

import pytest
import torch

from freight.ops.protocols import AttentionSpec
from freight.verify.ranks import RankPool
from freight.verify.tolerances import difference
from tests.parallel.context_tasks import Case, attend, plain

METHODS = ["ring", "ring contiguous", "all_gather", "all_gather contiguous", "ulysses"]


def variants(methods: list[str], ranks: int) -> list[Case]:
    """One of every kind of stream, heads, mask and switch, for each method."""
    plain_spec = AttentionSpec(scale=0.4, layer=1)
    cases = []
    for method in methods:
        cases += [
            Case(method),
            Case(method, lengths=(30,), padding=0),
            Case(method, lengths=(31,), padding=3, groups=8),
            Case(method, lengths=(3, 1, 2, 1, 20), groups=1),
            Case(method, groups=2),
            Case(method, heads=6, groups=2),
            Case(method, heads=9, groups=3, portions=3),
            Case(method, spec=AttentionSpec(scale=0.4, window=4)),
            Case(method, lengths=(40,), padding=1, spec=AttentionSpec(scale=0.4, window=11)),
            Case(method, spec=AttentionSpec(scale=0.4, softcap=2.0)),
            Case(method, spec=AttentionSpec(scale=0.4, dropout=0.3, layer=2)),
            Case(method, lengths=(17, 8), groups=2, spec=AttentionSpec(scale=0.4, dropout=0.3, window=6)),
            Case(method, backend="math"),
            Case(method, lengths=(4, 4, 4, 4), padding=0, spec=plain_spec),
            Case(method, lengths=(1,), padding=0),
        ]
    return cases


def check(cases: list[Case], results: list[list[torch.Tensor]]) -> None:
    for case, parts in zip(cases, results, strict=True):
        padding = ~case.batch().valid
        for name, actual, wanted in zip(("context", "dq", "dk", "dv"), parts, plain(case), strict=True):
            assert difference(actual, wanted) < 1e-12, f"{name} of {case}"
            assert (actual[padding] == 0).all(), f"{name} at padding of {case}"


@pytest.mark.parametrize("world", [2, 4])
def test_every_method_equals_one_process(ranks: RankPool, world: int) -> None:
    cases = variants([*METHODS, *(["hybrid"] if world == 4 else [])], world)
    for results in ranks.run(attend, world, cases):
        check(cases, results)
