"""The whole of `freight verify`: shrink, run the reference, run the ranks, compare; if they differ, look for the cause.

A run of the ranks costs a second or two once they are there, which is why what is off and on is compared too, and why a
fault is looked for by switching off one thing after another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass
from itertools import accumulate

import torch

from freight.config.architecture import Architecture
from freight.config.data_checks import known_pack_size
from freight.config.schema import Config
from freight.planner.execution import resolve_execution
from freight.verify.case import Case, Dtype, drawn_weights, moved
from freight.verify.compare import Claim, Comparison, Difference, agree, alone, bit_equal, compare, unmoved
from freight.verify.ranks import RankError, RankPool
from freight.verify.reference import Stream, run_reference, streams
from freight.verify.run import Job, run_jobs
from freight.verify.shrink import Change, shrink
from freight.verify.switches import EXACT, SWITCHES, without
from freight.verify.tolerances import TOLERANCES
from freight.verify.trace import RankTrace, Trace, joined, whole_losses

Progress = Callable[[int, int, str], None]
PERTURBED = 0  # the first document of each microbatch: every other one comes after it
UNKNOWN_ROW = 8192
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Proof:
    """What was found.

    Args:
        case: The small run.
        changes: From the configuration to it.
        claims: All that was compared.
        first: The first tensor that differs; None if all are equal.
        culprits: Switches without which all are equal: any one of them, or all together.
        together: Whether only all of `culprits` together help.
    """

    case: Case
    changes: tuple[Change, ...]
    claims: tuple[Claim, ...]
    first: Difference | None
    culprits: tuple[str, ...] = ()
    together: bool = False

    @property
    def equal(self) -> bool:
        """Whether every claim holds."""
        return all(claim.ok for claim in self.claims)


@dataclass(frozen=True)
class Prover:
    """Runs cases on ranks.

    Args:
        pool: Of ranks.
        sabotage: A fault that the ranks run with; None = none.
        progress: Draws `(done, total, what)`.
    """

    pool: RankPool
    sabotage: str | None = None
    progress: Progress = lambda done, total, what: None

    def prove(
        self,
        config: Config,
        arch: Architecture,
        *,
        ranks: int | None = None,
        keep: Collection[str] = (),
        full_mesh: bool = False,
        dtype: Dtype = "fp64",
        device: str = "cpu",
        look_for_cause: bool = True,
    ) -> Proof:
        """Verify a configuration.

        Args:
            config: Checked for its own device.
            arch: What its model means.
            ranks: Processes of the user's run; None = as many as the configuration needs.
            keep: Dotted keys that keep their values in the small run.
            full_mesh: Axes keep their sizes.
            dtype: Of the ranks' arithmetic.
            device: Of the ranks.
            look_for_cause: If something differs, switch off one thing after another until nothing does.

        Raises:
            ConfigError: The configuration cannot be run on so many ranks; a key to keep does not exist.
            ShrinkError: The small run is too large for this machine.
            RankError: A rank failed or did not end in time.
        """
        plan = resolve_execution(config, arch, _microbatch_tokens(config), world_size=ranks)
        with tempfile.TemporaryDirectory(prefix="freight-verify-") as directory:
            shrunk = shrink(
                config, arch, plan, keep=keep, full_mesh=full_mesh, directory=directory, dtype=dtype, device=device
            )
            claims, first = self._compared(shrunk.case)
            culprits: tuple[str, ...] = ()
            together = False
            if look_for_cause and first is not None:
                culprits, together = self._cause(shrunk.case)
        return Proof(shrunk.case, shrunk.changes, tuple(claims), first, culprits, together)

    def _compared(self, case: Case) -> tuple[list[Claim], Difference | None]:
        drawn, found = drawn_weights(case), streams(case)
        wanted = run_reference(case, moved(drawn), self.progress)
        variants = {name: other for name in EXACT if (other := without(case, name)) is not None}
        jobs = [Job(case, drawn, PERTURBED), *(Job(other, drawn, look_inside=False) for other in variants.values())]
        (own, *others) = self._run(jobs)
        got, tolerance = _joined(own, found), TOLERANCES[DTYPES[case.dtype]]
        comparison = compare(got, wanted, tolerance, _axes(case))
        first_step = {stream.microbatch: stream for stream in found if stream.step == 0}
        spans = {number: [len(d.ids) for d in stream.documents] for number, stream in first_step.items()}
        changed = whole_losses(own, {(0, number): stream.numbers for number, stream in first_step.items()}, PERTURBED)
        claims = [
            _drawn_alike(own),
            *comparison.claims,
            *([agree([_reported(rank) for rank in own])] if case.world > 1 else []),
            alone(got.losses, wanted.losses, tolerance),
            *filter(None, [unmoved(got.losses, changed, spans, PERTURBED)]),
            *(
                bit_equal(EXACT[name], got, joined(traces, {}, {}))
                for name, traces in zip(variants, others, strict=True)
            ),
        ]
        return claims, comparison.first

    def _run(self, jobs: list[Job]) -> list[list[RankTrace]]:
        """Traces of all ranks, job by job; all jobs have the same ranks."""
        with ThreadPoolExecutor(1) as waiter:
            future = waiter.submit(self.pool.run, run_jobs, jobs[0].case.world, jobs, self.sabotage)
            what = f"running {jobs[0].case.world} rank{'s' * (jobs[0].case.world > 1)}"
            while True:
                try:
                    by_rank = future.result(timeout=0.5)
                    break
                except StillRunning:
                    self.progress(0, 0, what)
        self.progress(1, 1, what)
        return [list(of_job) for of_job in zip(*by_rank, strict=True)]

    def _passes(self, case: Case) -> bool:
        """Whether a run is equal to its reference."""
        drawn = drawn_weights(case)
        try:
            (own,) = self._run([Job(case, drawn)])
        except RankError:
            return False
        wanted = run_reference(case, moved(drawn), lambda *_: None)
        return self._comparison(case, own, wanted).first is None

    def _comparison(self, case: Case, own: list[RankTrace], wanted: Trace) -> Comparison:
        got = _joined(own, streams(case))
        return compare(got, wanted, TOLERANCES[DTYPES[case.dtype]], _axes(case))

    def _cause(self, case: Case) -> tuple[tuple[str, ...], bool]:
        """Switches each of which, alone, explains the difference; or the fewest in turn that do so together."""
        names = [name for name in SWITCHES if without(case, name) is not None]
        alone_helps = []
        for number, name in enumerate(names):
            self.progress(number, len(names), "looking for the cause")
            other = without(case, name)
            if other is not None and self._passes(other):
                alone_helps.append(name)
        self.progress(len(names), len(names), "looking for the cause")
        if alone_helps:
            return tuple(alone_helps), False
        for off in accumulate(([name] for name in names), lambda done, more: done + more):
            other = without(case, *off)
            if len(off) > 1 and other is not None and self._passes(other):
                return tuple(off), True
        return (), False


def _microbatch_tokens(config: Config) -> int:
    """Tokens of a microbatch; where only a packed file could tell, enough for a few chunks."""
    chunk = config.fpdt.chunk_tokens if config.fpdt is not None else "auto"
    unknown = UNKNOWN_ROW if chunk == "auto" else 4 * chunk
    return config.train.micro_batch_tokens or known_pack_size(config.data) or unknown


def _joined(own: list[RankTrace], found: list[Stream]) -> Trace:
    places = {(stream.step, stream.microbatch): stream for stream in found}
    numbers = {place: stream.numbers for place, stream in places.items()}
    return joined(own, numbers, {place: stream.tokens for place, stream in places.items()})


def _axes(case: Case) -> dict[str, int]:
    """What a wrong factor may come from."""
    rows = case.rows_per_step / (case.rows_per_microbatch * case.data_ranks)
    return {
        "context": case.context_ranks,
        "data": case.data_ranks,
        "all ranks": case.world,
        "accumulation": round(rows),
        "query heads per key-value head": case.arch.num_attention_heads // case.arch.groups,
    }


def _drawn_alike(ranks: list[RankTrace]) -> Claim:
    claim = Claim("weights drawn as one process draws them", tensors=1)
    for rank in ranks:
        for name in rank.drawn:
            claim.add(name, name, float("inf"), 0.0)
    return claim


def _reported(rank: RankTrace) -> list[tuple[int, float, float]]:
    return [(step.num_targets, step.loss, step.norm) for step in rank.steps]
