"""Where two traces differ, and what that looks like."""

from __future__ import annotations

import torch
from torch import Tensor

from freight.verify.compare import alone, bit_equal, compare, unmoved
from freight.verify.trace import RankTrace, StepTrace, Trace, gathered, joined


def trace(gradient: Tensor, loss: float = 2.0, labels: tuple[int, ...] = (1, -100)) -> Trace:
    tokens = {(0, 0): {"labels": torch.tensor(labels)}}
    return Trace(tokens, {}, [StepTrace(1, loss, {"w": gradient}, 3.0, 1.0, {"w": gradient + 1})])


def test_equal_traces_have_no_difference() -> None:
    found = compare(trace(torch.ones(2).double()), trace(torch.ones(2).double()), 1e-9, {})
    assert found.first is None and all(claim.ok and claim.error == 0 for claim in found.claims)


def test_the_first_difference_in_the_order_of_execution_is_named() -> None:
    wanted = trace(torch.tensor([1.0, 5.0]).double())
    found = compare(trace(torch.tensor([1.0, 5.5]).double(), loss=2.5), wanted, 1e-9, {}).first
    assert found is not None and found.name == "loss of step 0" and (found.got, found.wanted) == (2.5, 2.0)
    found = compare(trace(torch.tensor([1.0, 5.5]).double()), wanted, 1e-9, {}).first
    assert found is not None and found.name == "gradient of w in step 0"
    assert (found.place, found.got, found.wanted, found.error, found.ratio) == ((1,), 5.5, 5.0, 0.1, None)


def test_integers_must_be_equal_however_loose_the_tolerance() -> None:
    found = compare(trace(torch.ones(2), labels=(1, 0)), trace(torch.ones(2)), 1e9, {}).first
    assert found is not None and found.name == "labels of step 0, microbatch 0" and found.place == (1,)


def test_one_factor_over_a_whole_tensor_is_told() -> None:
    wanted = torch.tensor([1.0, -2.0]).double()
    for factor, hint in (
        (2.0, "looks like a missing division by context"),
        (0.5, "looks like a division by context too many, or a missing sum over it"),
        (3.0, ""),
    ):
        found = compare(trace(factor * wanted), trace(wanted), 1e-9, {"data": 1, "context": 2}).first
        assert found is not None and found.ratio == factor and found.hint == hint
        assert f"x {factor:.3f}" in str(found)


def test_what_is_missing_or_not_finite_differs() -> None:
    wanted = trace(torch.ones(2).double())
    for got in (trace(torch.ones(3).double()), trace(torch.tensor([1.0, float("nan")]).double()), Trace()):
        found = compare(got, wanted, 1e-9, {})
        assert found.first is not None and any(claim.error == float("inf") for claim in found.claims)
    more = trace(torch.ones(2).double())
    more.steps[0].gradients["other"] = torch.ones(1)
    assert [claim.name for claim in compare(more, wanted, 1e-9, {}).claims if not claim.ok] == ["unexpected tensors"]


def test_bit_equality_forgives_nothing() -> None:
    one = trace(torch.ones(2).double())
    assert bit_equal("same", one, trace(torch.ones(2).double())).ok
    claim = bit_equal("same", one, trace(torch.ones(2).double() * (1 + 2e-16)))
    assert not claim.ok and claim.error > 0


def test_a_replaced_document_moves_itself_alone() -> None:
    before, spans = {0: torch.tensor([1.0, 2.0, 3.0])}, {0: [2, 1]}
    claim = unmoved(before, {0: torch.tensor([1.5, 2.0, 3.0])}, spans, 0)
    assert claim is not None and claim.ok
    claim = unmoved(before, {0: torch.tensor([1.5, 2.0, 3.0 + 1e-6])}, spans, 0)
    assert claim is not None and not claim.ok and claim.worst == "loss of document 1 of microbatch 0"
    claim = unmoved(before, before, spans, 0)
    assert claim is not None and not claim.ok and claim.detail == "the replaced document did not change either"
    assert unmoved(before, before, {0: [3]}, 0) is None


def test_documents_alone_are_compared_token_by_token() -> None:
    assert alone({0: torch.ones(2)}, {0: torch.ones(2)}, 1e-9).ok
    assert not alone({0: torch.tensor([1.0, 1.1])}, {0: torch.ones(2)}, 1e-9).ok


def test_pieces_of_ranks_are_put_together_by_token_number() -> None:
    of_ranks = [
        RankTrace({(0, 0, "q"): [(torch.tensor([3, 0]), torch.tensor([30.0, 0.0]))]}),
        RankTrace({(0, 0, "q"): [(torch.tensor([2, 1]), torch.tensor([20.0, 10.0]))]}),
    ]
    whole = joined(of_ranks, {(0, 0): torch.tensor([1, 2, 3])}, {(0, 0): 4})
    assert whole.tokens[0, 0]["q"].tolist() == [10.0, 20.0, 30.0]
    missing = gathered([(torch.tensor([0, 2]), torch.tensor([1.0, 2.0]))], torch.tensor([0, 1]))
    assert missing[0] == 1 and missing[1].isnan()
