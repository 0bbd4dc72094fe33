"""Two traces against each other: an error for every tensor, and of the first one that differs, what it looks like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freight.verify.tolerances import difference
from freight.verify.trace import Item, Trace, in_order

RATIO_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Difference:
    """One tensor that is not what it should be.

    Args:
        name: Of the tensor, with step and microbatch.
        shape: Of it.
        error: `max |x - y| / max(1, max |y|)`.
        place: Index of the largest difference.
        got: The ranks' value there.
        wanted: The reference's.
        ratio: By which the whole tensor is too large; None if it is not one factor.
        hint: What such a ratio looks like; empty if it is none of an axis' size.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    place: tuple[int, ...]
    got: float
    wanted: float
    ratio: float | None
    hint: str

    def __str__(self) -> str:
        where = f"{list(self.place)}" if self.place else "its value"
        ratio = "" if self.ratio is None else f"; x {self.ratio:.3f}" + (f": {self.hint}" if self.hint else "")
        return (
            f"{self.name}, shape {list(self.shape)}: {where} is {self.got:.9g}, should be {self.wanted:.9g}; "
            f"max relative difference {self.error:.2g}{ratio}"
        )


@dataclass
class Claim:
    """One thing that is shown.

    Args:
        name: What it is.
        tensors: How many were compared.
        error: The largest of them; 0 = equal bit for bit.
        worst: The tensor that has it.
        ok: Whether all are within tolerance.
        detail: More about it, for the reader.
        errors: Largest of each tensor over steps, by name.
    """

    name: str
    tensors: int = 0
    error: float = 0.0
    worst: str = ""
    ok: bool = True
    detail: str = ""
    errors: dict[str, float] = field(default_factory=dict)

    def add(self, key: str, name: str, error: float, tolerance: float) -> None:
        """Take in one tensor."""
        self.tensors += 1
        self.errors[key] = max(error, self.errors.get(key, 0.0))
        if error > self.error:
            self.error, self.worst = error, name
        self.ok = self.ok and error <= tolerance


@dataclass(frozen=True)
class Comparison:
    """What came of comparing a run.

    Args:
        claims: In the order in which they are first touched by execution.
        first: The first tensor in that order that differs; None if none does.
    """

    claims: tuple[Claim, ...]
    first: Difference | None


def compare(got: Trace, wanted: Trace, tolerance: float, axes: Mapping[str, int]) -> Comparison:
    """The ranks' trace against the reference's.

    Args:
        got: Of the ranks.
        wanted: Of the reference.
        tolerance: On `difference`; integers must be equal.
        axes: Names and sizes that a wrong factor may come from.
    """
    claims: dict[str, Claim] = {}
    first: Difference | None = None
    found = {item.name: item.value for item in in_order(got)}
    for item in in_order(wanted):
        value = found.pop(item.name, torch.full_like(item.value.double(), float("nan")))
        error = difference(value, item.value)
        allowed = tolerance if item.value.is_floating_point() else 0.0
        claims.setdefault(item.claim, Claim(item.claim)).add(item.key, item.name, error, allowed)
        if first is None and error > allowed:
            first = described(item, value, error, axes)
    for name in (name for name, value in found.items() if value.numel()):  # fillers have no token to show
        claims.setdefault("unexpected tensors", Claim("unexpected tensors")).add(name, name, float("inf"), tolerance)
    return Comparison(tuple(claims.values()), first)


def described(item: Item, value: Tensor, error: float, axes: Mapping[str, int]) -> Difference:
    """Where two tensors differ most, and by which factor if it is one."""
    if value.shape != item.value.shape:
        nan = float("nan")
        return Difference(item.name, tuple(value.shape), error, (), nan, nan, None, "")
    x, y = value.double(), item.value.double()
    gaps = (x - y).abs().nan_to_num(nan=torch.inf)
    place = tuple(int(i) for i in torch.unravel_index(gaps.argmax(), gaps.shape)) if gaps.ndim else ()
    ratio = _ratio(x, y) if item.value.is_floating_point() else None
    return Difference(
        item.name, tuple(y.shape), error, place, float(x[place]), float(y[place]), ratio, _hint(ratio, axes)
    )


def _ratio(x: Tensor, y: Tensor) -> float | None:
    """The factor that makes x of y; None if no factor does."""
    square = float((y * y).sum())
    if not square or not bool(torch.isfinite(x).all()):
        return None
    ratio = float((x * y).sum()) / square
    gap = float(torch.linalg.vector_norm(x - ratio * y))
    return ratio if gap <= RATIO_TOLERANCE * float(torch.linalg.vector_norm(y)) else None


def _hint(ratio: float | None, axes: Mapping[str, int]) -> str:
    if ratio is None:
        return ""
    for name, size in axes.items():
        if size > 1 and abs(ratio - size) < 0.01:
            return f"looks like a missing division by {name}"
        if size > 1 and abs(ratio * size - 1) < 0.01:
            return f"looks like a division by {name} too many, or a missing sum over it"
    return ""


def bit_equal(name: str, got: Trace, other: Trace) -> Claim:
    """That two runs left the same steps, bit for bit."""
    claim = Claim(name)
    values = {item.name: item.value for item in in_order(Trace(steps=other.steps))}
    for item in in_order(Trace(steps=got.steps)):
        value = values[item.name]
        error = 0.0 if torch.equal(item.value, value) else max(difference(item.value, value), 1e-300)
        claim.add(item.key, item.name, error, 0.0)
    return claim


def unmoved(
    losses: Mapping[int, Tensor], changed: Mapping[int, Tensor], spans: Mapping[int, Sequence[int]], document: int
) -> Claim | None:
    """That no other document moves by a bit when one is replaced; None where no microbatch has a second one.

    Args:
        losses: Of every real token by microbatch.
        changed: The same with one document replaced.
        spans: Lengths of the documents of each microbatch.
        document: Number of the one replaced.
    """
    claim, moved = Claim("one document replaced: others unchanged"), False
    for microbatch, lengths in spans.items():
        if document >= len(lengths) or len(lengths) < 2:
            continue
        parts = zip(losses[microbatch].split(list(lengths)), changed[microbatch].split(list(lengths)), strict=True)
        for number, (before, after) in enumerate(parts):
            if number == document:
                moved |= not torch.equal(before, after)
            else:
                name = f"loss of document {number} of microbatch {microbatch}"
                error = 0.0 if torch.equal(before, after) else max(difference(after, before), 1e-300)
                claim.add(name, name, error, 0.0)
    if not claim.tensors:
        return None
    if not moved:
        claim.ok, claim.detail = False, "the replaced document did not change either"
    return claim


def alone(losses: Mapping[int, Tensor], wanted: Mapping[int, Tensor], tolerance: float) -> Claim:
    """That every token's loss in the packed run is that of its document alone."""
    claim = Claim("each document alone")
    for microbatch, value in wanted.items():
        name = f"loss of each token of microbatch {microbatch}"
        claim.add(name, name, difference(losses[microbatch], value), tolerance)
    return claim


def agree(ranks: Iterable[Sequence[tuple[int, float, float]]]) -> Claim:
    """That all ranks report the same counts, losses and norms.

    Args:
        ranks: `(token count, loss, norm)` of every step, per rank.
    """
    claim, (first, *others) = Claim("all ranks report the same"), [list(rank) for rank in ranks]
    for number, other in enumerate(others, 1):
        for step, (mine, theirs) in enumerate(zip(first, other, strict=True)):
            name = f"step {step} on rank {number}"
            same = torch.tensor(mine).equal(torch.tensor(theirs)) or all(x != x for x in (*mine[1:], *theirs[1:]))
            claim.add(name, name, 0.0 if same else float("inf"), 0.0)
    return claim
