"""What `freight verify` prints: a line for every change, claim and gradient, and a verdict; and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from freight.verify.compare import Claim
from freight.verify.prove import Proof

WORST_SHOWN = 10


def report_lines(proof: Proof) -> Iterator[str]:
    """The report of a proof, line by line."""
    case = proof.case
    yield "small run of the same kind, on made-up documents:"
    yield from (f"  {change}" for change in proof.changes)
    ranks = f"{case.world} rank{'s' * (case.world > 1)}"
    if case.world > 1:
        ranks += f" ({case.data_ranks} data x {case.context_ranks} context)"
    yield (
        f"{ranks} in {case.dtype} on {case.device}, against 1 process in float64: one document at a time, "
        "every pair of tokens, full logits"
    )
    for claim in proof.claims:
        yield _claim_line(claim)
    yield from _gradient_lines(proof)
    if proof.equal:
        yield "verdict: equal"
        return
    yield "verdict: DIFFERENT"
    if proof.first is not None:
        yield f"first in the order of execution: {proof.first}"
    yield from _cause_lines(proof)


def _claim_line(claim: Claim) -> str:
    verdict = "ok" if claim.ok else "DIFFERENT"
    many = "" if claim.tensors == 1 else f"{claim.tensors} tensors"
    parts = [many, "" if claim.ok or not claim.worst else f"worst: {claim.worst}", claim.detail]
    return f"  {claim.name:42} {_error(claim.error):>8}  {verdict:9}  {'; '.join(filter(None, parts))}".rstrip()


def _gradient_lines(proof: Proof) -> Iterator[str]:
    """Errors of every parameter's gradient, worst first."""
    for claim in proof.claims:
        if claim.name != "gradients":
            continue
        ordered = sorted(claim.errors.items(), key=lambda item: -item[1])
        yield "gradients, worst first:"
        yield from (f"  {_error(error):>8}  {name}" for name, error in ordered[:WORST_SHOWN])
        if len(ordered) > WORST_SHOWN:
            yield f"  {len(ordered) - WORST_SHOWN} more, at most {_error(ordered[WORST_SHOWN][1])}"


def _cause_lines(proof: Proof) -> Iterator[str]:
    if proof.first is None:
        return
    if not proof.culprits:
        yield "switched off one at a time: it stays different, so the fault is in what all configurations share"
    elif proof.together:
        yield f"switched off one at a time: equal only without all of {', '.join(proof.culprits)}"
    else:
        yield f"switched off one at a time: equal without {' or without '.join(proof.culprits)}"


def _error(error: float) -> str:
    if error == 0:
        return "equal"
    return "a bit" if error < 1e-200 else f"{error:.1e}" if math.isfinite(error) else "missing"


def as_json(proof: Proof) -> dict[str, Any]:
    """The report as plain values; errors that are not finite are null."""
    first = proof.first
    return {
        "equal": proof.equal,
        "ranks": proof.case.world,
        "data_ranks": proof.case.data_ranks,
        "context_ranks": proof.case.context_ranks,
        "dtype": proof.case.dtype,
        "device": proof.case.device,
        "changes": [{"key": c.key, "before": c.before, "after": c.after, "why": c.why} for c in proof.changes],
        "claims": [
            {
                "name": claim.name,
                "ok": claim.ok,
                "error": _finite(claim.error),
                "tensors": claim.tensors,
                "worst": claim.worst,
                "errors": {name: _finite(error) for name, error in claim.errors.items()},
            }
            for claim in proof.claims
        ],
        "first": None
        if first is None
        else {
            "name": first.name,
            "shape": list(first.shape),
            "place": list(first.place),
            "got": _finite(first.got),
            "wanted": _finite(first.wanted),
            "error": _finite(first.error),
            "ratio": first.ratio,
            "hint": first.hint,
        },
        "culprits": list(proof.culprits),
        "culprits_together": proof.together,
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
