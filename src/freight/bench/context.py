"""Context parallelism: seconds, bytes and hidden communication of every method, against ringmaster's Ulysses.

One attention layer, forward and backward, on ranks that are processes of one thread. Where root and iproute2 are at
hand they are joined by a network of known rate, else by loopback, where nothing can be hidden: a message then costs the
very cores that compute. A step is as long as its slowest rank takes.

`hidden_share` is `(off - on) / hideable`: what overlap saves, of what could be saved at best, which is the smaller of
communication (`off - compute`) and computing.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from freight.bench.context_rank import DTYPES, RIVAL, Task
from freight.bench.options import chosen_options
from freight.bench.rank_processes import module_command, run_ranks
from freight.bench.ringmaster_ulysses import version
from freight.bench.slow_network import Network, slow_network
from freight.errors import ConfigError
from freight.parallel.context_method import ContextMethod

OPTIONS: dict[str, Any] = {
    "ranks": 2,
    "methods": "ring,all_gather,ulysses",
    "tokens": 2048,
    "documents": 1,
    "heads": 8,
    "groups": 4,
    "head_dim": 64,
    "dtype": "fp32",
    "portions": 4,
    "rate_mbit": 200.0,
    "repeats": 7,
}
COUNTS = ("ranks", "tokens", "documents", "heads", "groups", "head_dim", "portions", "repeats")
COLLECTIVE_SECONDS = 60.0
# Starting ranks, checks, and turns of a slow network; a rank that hangs in a collective ends after its own timeout.
RUN_SECONDS = 1800.0
SHOWN_LINES = 3


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the methods.

    Args:
        options: `ranks`; `methods`, names joined by commas (`hybrid` needs 4 ranks); `tokens` of the stream and the
            `documents` it holds; `heads`, `groups`, `head_dim`; `dtype` (`fp32` or `bf16`); `portions` that heads are
            exchanged in; `rate_mbit` (10^6 bits a second that a rank can send; 0 = loopback); `repeats`.

    Returns:
        `methods`, by name: `seconds` of a step, `compute_seconds`, `off_seconds`, `sent_bytes_per_token` (by formula),
        `wire_bytes_per_token` (by the network interface, protocol headers included; null over loopback),
        `hidden_share`, `ratio_over_ringmaster` (its seconds over ours; null with `ringmaster_reason`). The four figures
        again under `METHOD_NAME`. `network`: `namespaces`, or `loopback` with `network_reason`.

    Raises:
        ConfigError: An option that does not exist or cannot be, or a rank that failed.
    """
    chosen = chosen_options(options, OPTIONS)
    methods = _checked(chosen)
    shape = {name: chosen[name] for name in COUNTS} | {"dtype": chosen["dtype"]}
    with (
        slow_network(chosen["ranks"], float(chosen["rate_mbit"])) as network,
        tempfile.TemporaryDirectory(prefix="freight-context-") as folder,
    ):
        task = Task(**shape, methods=methods, interface=network.interface, timeout_seconds=COLLECTIVE_SECONDS)
        seen = _run_ranks(task, network, Path(folder))
    figures = {method: _figures(task, network, [of_rank[method] for of_rank in seen]) for method in methods}
    names = ("seconds", "sent_bytes_per_token", "hidden_share", "ratio_over_ringmaster")
    return {
        "benchmark": "context",
        **chosen,
        "network": network.kind,
        "network_reason": network.reason,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "ringmaster": version(),
        **{f"{method}_{name}": figures[method][name] for method in methods for name in names},
        "methods": figures,
    }


def _checked(chosen: Mapping[str, Any]) -> tuple[str, ...]:
    """The methods.

    Raises:
        ConfigError: Options that cannot be.
    """
    for name in COUNTS:
        if chosen[name] < 1:
            raise ConfigError(f"option `{name}` must be at least 1; got {chosen[name]}.")
    ranks, tokens, documents = chosen["ranks"], chosen["tokens"], chosen["documents"]
    if ranks < 2:
        raise ConfigError(f"option `ranks` must be at least 2, or nothing is sent; got {ranks}.")
    if chosen["rate_mbit"] < 0:
        raise ConfigError(f"option `rate_mbit` must be above 0, or 0 for loopback; got {chosen['rate_mbit']:g}.")
    if chosen["dtype"] not in DTYPES:
        raise ConfigError(f"option `dtype` is {' or '.join(DTYPES)}; got {chosen['dtype']}.")
    if tokens % (documents * 2 * ranks):
        raise ConfigError(
            f"option `tokens` must be a multiple of documents x 2 x ranks = {documents * 2 * ranks}; got {tokens}."
        )
    if chosen["heads"] % chosen["groups"] or chosen["heads"] < ranks:
        raise ConfigError(
            f"option `heads` must be a multiple of `groups` {chosen['groups']} and at least `ranks` {ranks}; "
            f"got {chosen['heads']}."
        )
    methods = tuple(name.strip() for name in chosen["methods"].split(","))
    for name in methods:
        if name not in list(ContextMethod):
            raise ConfigError(f"option `methods`: {name!r} is none of {', '.join(ContextMethod)}.")
        if name == ContextMethod.HYBRID and (ranks < 4 or ranks % 2):
            raise ConfigError(f"option `methods`: hybrid needs an even number of ranks, at least 4; got {ranks}.")
    return methods


def _run_ranks(task: Task, network: Network, folder: Path) -> list[dict[str, Any]]:
    """What every rank saw.

    Raises:
        ConfigError: One has failed, in its own words, or all take too long.
    """
    (folder / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
    # torch's gloo reads the interface from there; one thread per rank, whatever this process uses.
    variables = {"GLOO_SOCKET_IFNAME": network.interface, "OMP_NUM_THREADS": 1}
    commands = [
        module_command("freight.bench.context_rank", str(rank), str(folder), variables=variables, prefix=prefix)
        for rank, prefix in enumerate(network.prefixes)
    ]
    ended = run_ranks(commands, folder, RUN_SECONDS)
    if ended.failed is not None:
        words = ended.said(ended.failed, SHOWN_LINES)
        raise ConfigError(f"rank {ended.failed} ended with code {ended.codes[ended.failed]}: {words}")
    if ended.timed_out:
        raise ConfigError(f"the ranks did not finish within {RUN_SECONDS:g} s. Use fewer `tokens` or `repeats`.")
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(task.ranks)]


def _figures(task: Task, network: Network, seen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One method's figures, from what every rank saw of it."""
    seconds = {
        side: statistics.median(map(max, *(of_rank["seconds"][side] for of_rank in seen)))
        for side in seen[0]["seconds"]
    }
    wire = sum(of_rank["wire_bytes"]["on"] for of_rank in seen) / task.repeats / task.tokens
    rival = seconds.get(RIVAL)
    return {
        "seconds": seconds["on"],
        "compute_seconds": seconds["compute"],
        "off_seconds": seconds["off"],
        "sent_bytes_per_token": sum(of_rank["sent_bytes"] for of_rank in seen) / task.tokens,
        "wire_bytes_per_token": None if network.kind == "loopback" else wire,
        "hidden_share": hidden_share(seconds["compute"], seconds["off"], seconds["on"]),
        "ringmaster_seconds": rival,
        "ratio_over_ringmaster": None if rival is None else rival / seconds["on"],
        "ringmaster_reason": seen[0]["rival_reason"],
    }


def hidden_share(compute: float, off: float, on: float) -> float | None:
    """What overlap saves of what it could save; None where a step without it is no longer than computing alone.

    Args:
        compute: Seconds of a step that sends nothing.
        off: Seconds of a step that waits for every message at once.
        on: Seconds of a step that computes meanwhile.
    """
    hideable = min(off - compute, compute)
    return None if hideable <= 0 else (off - on) / hideable
