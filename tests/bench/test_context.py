"""The context benchmark: its bytes are those sent, its figures follow from the ranks' times, its network goes away."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from freight.bench import context, ringmaster_ulysses, slow_network
from freight.bench.context import hidden_share, run
from freight.bench.context_rank import Task
from freight.bench.ringmaster_ulysses import CannotRun, build_step
from freight.bench.slow_network import Network
from freight.errors import ConfigError
from freight.ops.attention import LocalAttention
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec
from freight.verify.ranks import RankPool
from tests.bench.context_counting import counted_and_computed, measured

TASK = Task(
    ranks=2,
    methods=("ring", "all_gather", "ulysses"),
    tokens=64,
    documents=2,
    heads=4,
    groups=2,
    head_dim=8,
    dtype="fp32",
    portions=2,
    repeats=2,
    interface="lo",
    timeout_seconds=60.0,
)


def variant(**changes: object) -> Task:
    return Task(**{**vars(TASK), **changes})


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_by_formula_are_those_sent(ranks: RankPool, world: int) -> None:
    shapes = [{}, {"heads": 6, "groups": 3}, {"groups": 1}, {"dtype": "bf16"}]
    methods = ["ring", "all_gather", "ulysses", "hybrid"][: 3 + (world == 4)]
    tasks = [variant(ranks=world, methods=(method,), **shape) for shape in shapes for method in methods]
    for of_rank in ranks.run(counted_and_computed, world, tasks):
        for task, (method, sent, formula) in zip(tasks, of_rank, strict=True):
            assert sent == formula > 0, (method, task)


def test_every_side_is_timed_in_turn(ranks: RankPool) -> None:
    for of_rank in ranks.run(measured, 2, TASK):
        assert list(of_rank) == list(TASK.methods)
        for result in of_rank.values():
            assert {"compute", "off", "on"} <= set(result.seconds)
            assert all(len(turns) == TASK.repeats and min(turns) > 0 for turns in result.seconds.values())
            assert (result.rival_reason == "") == ("ringmaster" in result.seconds)


def test_a_run_from_options_to_figures() -> None:
    """Over a network of its own where that can be built, else over loopback; both say so."""
    chosen = {"tokens": 512, "heads": 4, "groups": 2, "repeats": 1, "methods": "ring, ulysses", "rate_mbit": 500}
    result = run(chosen)
    for method in ("ring", "ulysses"):
        figures = result["methods"][method]
        for name in ("seconds", "sent_bytes_per_token", "hidden_share", "ratio_over_ringmaster"):
            assert result[f"{method}_{name}"] == figures[name]
        assert figures["seconds"] > 0
        # Two ranks: ring moves k and v twice and their gradients once; Ulysses half of q, k, v and out, twice.
        assert figures["sent_bytes_per_token"] == 3 * 2 * 2 * 64 * 4
        if result["network"] == "namespaces":
            assert 1 <= figures["wire_bytes_per_token"] / figures["sent_bytes_per_token"] < 1.25
        else:
            assert result["network_reason"] and figures["wire_bytes_per_token"] is None
    assert result["network"] == "loopback" or not any(str(os.getpid()) in name for name in _namespaces())


def _namespaces() -> list[str]:
    return slow_network._ip("netns", "list").splitlines()


def test_hidden_share_by_the_numbers() -> None:
    assert hidden_share(1.0, 1.5, 1.1) == pytest.approx(0.8)
    assert hidden_share(1.0, 3.0, 2.0) == pytest.approx(1.0)  # no more than computing can hide
    assert hidden_share(1.0, 1.5, 1.75) == pytest.approx(-0.5)
    assert hidden_share(1.0, 0.9, 0.8) is None


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    seconds = [
        {"compute": [1, 1, 1], "off": [3, 3, 3], "on": [2, 9, 4]},
        {"compute": [2] * 3, "off": [1] * 3, "on": [3] * 3},
    ]
    seen = [
        {"seconds": each, "wire_bytes": {"on": 640}, "sent_bytes": 64.0, "rival_reason": "absent"} for each in seconds
    ]
    figures = context._figures(
        variant(tokens=16, documents=1, repeats=4), Network("namespaces", "", 1.0, (), "x"), seen
    )
    assert (figures["seconds"], figures["compute_seconds"], figures["off_seconds"]) == (4, 2, 3)
    assert (figures["sent_bytes_per_token"], figures["wire_bytes_per_token"]) == (8, 20)
    assert (figures["ratio_over_ringmaster"], figures["ringmaster_reason"]) == (None, "absent")
    for each in seen:
        each["seconds"]["ringmaster"] = [6] * 3
    assert context._figures(TASK, Network("loopback", "x", None, (), "lo"), seen)["ratio_over_ringmaster"] == 1.5


def test_a_rank_that_fails_is_heard(tmp_path: Path) -> None:
    failing = Network("loopback", "", None, (("sh", "-c", "echo no such kernel >&2; exit 3"), ("sleep", "60")), "lo")
    with pytest.raises(ConfigError, match=r"rank 0 ended with code 3: no such kernel"):
        context._run_ranks(TASK, failing, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 1}, "does not exist"),
        ({"ranks": 1}, "at least 2"),
        ({"tokens": 2050}, "multiple of documents x 2 x ranks = 4"),
        ({"heads": 6}, "multiple of `groups` 4"),
        ({"methods": "ring,rings"}, "'rings' is none of"),
        ({"methods": "hybrid"}, "at least 4"),
        ({"dtype": "fp8"}, "fp32 or bf16"),
        ({"rate_mbit": -1.0}, "above 0"),
        ({"repeats": 0}, "at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(options)


class Calls(list[str]):
    """Stands in for iproute2."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    def __call__(self, *words: str) -> str:
        line = " ".join(words)
        self.append(line)
        if self.broken and self.broken in line:
            raise OSError(line)
        return f"other\nfreight-{2**30}-1 (id: 3)\nfreight-{os.getppid()}-0\n" if line == "ip netns list" else ""


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(slow_network.shutil, "which", lambda tool: f"/sbin/{tool}")
    return monkeypatch


def made_and_deleted(calls: list[str]) -> tuple[list[str], list[str]]:
    return tuple(
        [line.split()[-1] for line in calls if line.startswith(f"ip netns {verb}")] for verb in ("add", "delete")
    )  # pyright: ignore


@pytest.mark.parametrize("end", ["well", "error", "half built", "terminated"])
def test_a_network_goes_away_however_it_ends(root: pytest.MonkeyPatch, end: str) -> None:
    calls = Calls("dev rank0 root tbf" if end == "half built" else "")
    root.setattr(slow_network, "_call", calls)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with slow_network.slow_network(2, 250.0) as network:
            assert (network.kind == "loopback") == (end == "half built") and len(network.prefixes) == 2
            assert ("tbf" in network.reason) == (end == "half built")
            if end == "error":
                raise ValueError
            if end == "terminated":
                os.kill(os.getpid(), signal.SIGTERM)
    except (ValueError, SystemExit) as error:
        wanted = {"error": ValueError, "terminated": SystemExit}
        assert type(error) is wanted[end]
    made, deleted = made_and_deleted(calls)
    left_by_others, *own = deleted
    assert left_by_others == f"freight-{2**30}-1", "what a killed process left behind, and nobody else's"
    assert set(made) <= set(own) and len(made) == (2 if end == "half built" else 3)
    assert signal.getsignal(signal.SIGTERM) is handler
    if end == "well":
        assert sum("tbf rate 250mbit" in line for line in calls) == 2


def test_without_root_or_rate_it_is_loopback_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_network.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    for rate, reason in ((0.0, "`rate_mbit` is 0"), (10.0, "tc of iproute2 not found")):
        with slow_network.slow_network(3, rate) as network:
            assert (network.kind, network.reason, network.prefixes) == ("loopback", reason, ((), (), ()))
    monkeypatch.setattr(slow_network.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with slow_network.slow_network(2, 10.0) as network:
        assert network.reason == "not root"


def test_a_package_that_is_not_installed_is_a_reason(monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh) -> None:
    monkeypatch.setattr(ringmaster_ulysses, "find_spec", lambda name: None)
    x = torch.zeros(4, 2, 8)
    with pytest.raises(CannotRun, match="axolotl-ringmaster is not installed"):
        build_step(mesh, TokenBatch.from_documents([[0] * 4]), AttentionSpec(scale=1.0), x, x, x, x)


def test_the_other_side_gets_the_same_inputs(monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh) -> None:
    """A stand-in for the package that hands out transformers' own attention, on one rank."""
    seen: dict[str, object] = {}

    def setup(config: object, **settings: object) -> SimpleNamespace:
        seen.update(settings, config=config)
        return SimpleNamespace(attn_implementation="sdpa")

    package = SimpleNamespace(
        RingmasterConfig=lambda **fields: fields, Backend=SimpleNamespace(ULYSSES="ulysses"), setup=setup
    )
    monkeypatch.setitem(sys.modules, "ringmaster", package)
    monkeypatch.setattr(ringmaster_ulysses, "find_spec", lambda name: object())
    batch, spec = TokenBatch.from_documents([[0] * 12]), AttentionSpec(scale=0.3)
    q, k, v, dout = (torch.randn(12, heads, 8) for heads in (4, 2, 2, 4))
    theirs = build_step(mesh, batch, spec, q, k, v, dout)()
    leaves = q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    context_of_ours = LocalAttention()(q, k, v, batch, spec)
    ours = [context_of_ours, *torch.autograd.grad(context_of_ours, leaves, dout)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert seen["num_kv_heads"] == 2 and seen["config"]["ulysses_size"] == 1  # pyright: ignore
