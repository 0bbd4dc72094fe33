"""What auto means, and which sizes do not fit: integers, known before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freight.config.architecture import Architecture
from freight.config.load import config_from
from freight.config.model import architecture_of
from freight.config.schema import Config
from freight.errors import ConfigError
from freight.memory.slots import Slots
from freight.planner.execution import resolve_execution, world_faults
from freight.planner.execution_words import execution_words
from freight.planner.tier_space import tier_faults


def config(row: int = 65536, **sections: Any) -> Config:
    raw: dict[str, Any] = {
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 8,
            "num_query_groups": 2,
            "vocab_size": 256,
            "max_position_embeddings": 1 << 22,
        },
        "data": {"train": "-", "tokenizer": "-", "sequence_length": row},
        "train": {"steps": 1, "global_batch_size": 1, "optimizer": {"lr": 1e-3}, "precision": "fp32"},
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    return config_from(raw)


def arch_of(run: Config) -> Architecture:
    return architecture_of(run.model)


def test_auto_chunks() -> None:
    """A quarter of a short row, 65536 of a long one; half of it through the MLP; a 32nd or 1024 in the loss."""
    for tokens, chunk, ffn, loss in (
        (65536, 16384, 8192, 1024),
        (262144, 65536, 32768, 2048),
        (400_000, 65536, 32768, 2048),
        (1 << 22, 65536, 32768, 2048),
        (100, 25, 12, 25),
    ):
        run = config(tokens, fpdt={})
        plan = resolve_execution(run, arch_of(run), tokens)
        assert plan.stream is not None and plan.stream.kv == "device"
        assert (plan.stream.chunk_tokens, plan.stream.ffn_chunk_tokens, plan.loss_chunk_tokens) == (chunk, ffn, loss)


@pytest.mark.parametrize("overlap", [True, False])
def test_heads_of_a_stream_travel_meanwhile_as_the_config_says(overlap: bool) -> None:
    run = config(parallel={"context": 2}, fpdt={}, overlap={"context": overlap})
    stream = resolve_execution(run, arch_of(run), 65536).stream
    assert stream is not None and stream.overlap is overlap


def test_a_row_is_padded_to_what_the_ranks_need() -> None:
    run = config(4001, parallel={"context": 4}, fpdt={"chunk_tokens": 1000})
    assert resolve_execution(run, arch_of(run), 4001).tokens == 4004
    rows = config(4001, parallel={"context": 4, "context_method": "hybrid", "ulysses": 2}, fpdt={"chunk_tokens": 1000})
    assert resolve_execution(rows, arch_of(rows), 4001).tokens == 4004
    assert resolve_execution(rows, arch_of(rows), 4001).rows == 2


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"fpdt": {"chunk_tokens": 65536}, "data": {"sequence_length": 32768}},
            "`fpdt.chunk_tokens` 65536 is not smaller than the longest row, 32768 tokens, so nothing would be "
            "streamed. Use at most 16384 or remove `fpdt`.",
        ),
        (
            {"fpdt": {}, "parallel": {"context": 4, "context_method": "ring"}},
            "`parallel.context_method: ring` cannot run under `fpdt`: K, V would circle once per chunk. Use `ulysses`, "
            "`all_gather` or `auto`.",
        ),
        (
            {"fpdt": {"chunk_tokens": 1002}, "parallel": {"context": 6, "context_method": "hybrid", "ulysses": 3}},
            "`fpdt.chunk_tokens` must be a multiple of 12: 6 context ranks come in rows, and a row holds an early and "
            "a late piece of each chunk; got 1002. Use 996 or 1008.",
        ),
        (
            {"parallel": {"context": 16, "context_method": "ulysses"}},
            "`parallel.context` 16 with `context_method: ulysses` needs at least 16 query heads per tensor-parallel "
            "rank; there are 8. Use `context_method: hybrid`, or `parallel.context` 8.",
        ),
        (
            {"parallel": {"context": 8, "context_method": "hybrid", "ulysses": 3}},
            "`parallel.ulysses` must divide `parallel.context`; 3 and 8. Use 1, 2, 4 or 8.",
        ),
        (
            {"parallel": {"context": 4, "context_method": "ring", "ulysses": 4}},
            "`parallel.ulysses` is 4 but `parallel.context_method` is ring, so it has no effect. Remove it or use "
            "`hybrid`.",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(sections: dict[str, Any], sentence: str) -> None:
    run = config(**sections)
    with pytest.raises(ConfigError) as caught:
        resolve_execution(run, arch_of(run), run.data.sequence_length or 0)
    assert caught.value.faults == (sentence,)


def test_processes_that_cannot_be_dealt_out() -> None:
    assert list(world_faults(config(parallel={"context": 3}), 8)) == [
        "`parallel.context` 3 must divide the 8 processes. Use 1, 2, 4 or 8, or start 3 processes: freight train "
        "CONFIG --ranks 3."
    ]
    assert list(world_faults(config(parallel={"context": 2, "data_shard": 2}), 8)) == [
        "`parallel.data_shard` 2 x `parallel.context` 2 = 4 must be the 8 processes. Use `parallel.data_shard` 4, or "
        "null."
    ]
    assert not list(world_faults(config(parallel={"context": 2}), 8))


def test_keys_and_values_leave_the_device_only_where_they_would_fill_it() -> None:
    """4 of 8 heads' worth of keys: T x 2 groups x 8 dims x 2 x (4 + 4) bytes; a quarter of the device is theirs."""
    run = config(65536, fpdt={"offload": "host"})
    need = 65536 * 2 * 8 * 2 * 8
    for device_bytes, kv in ((4 * need, "device"), (4 * need - 1, "offload"), (None, "device")):
        plan = resolve_execution(run, arch_of(run), 65536, device_bytes=device_bytes)
        assert plan.stream is not None and plan.stream.kv == kv


def test_the_tier_is_told_in_bytes_and_checked_before_it_is_taken(tmp_path: Path) -> None:
    run = config(65536, fpdt={"offload": "disk"}, offload={"directory": str(tmp_path / "gone")})
    plan = resolve_execution(run, arch_of(run), 65536)
    inputs, context, lse = (2 + 2) * 65536 * 64 * 4, 2 * 65536 * 64 * 4, 2 * 65536 * 8 * 4
    assert plan.tier_bytes == Slots(plan.slabs).total_bytes == inputs + context + lse

    def faults(run: Config, ranks: int = 1, host: int | None = None) -> list[str]:
        plan = resolve_execution(run, arch_of(run), 65536)
        return list(tier_faults(plan, run, arch_of(run), ranks_per_node=ranks, host_bytes=host))

    assert faults(run) == [
        f"`offload.directory` {tmp_path / 'gone'} is no folder. Make it, on a local disk, or name another."
    ]
    (tmp_path / "gone").mkdir()
    assert not faults(run)
    (full,) = faults(run, ranks=10**7)
    assert "per rank, 10000000 ranks here. Free space, or set `fpdt.save_attention: none` (64.0 MiB)." in full
    host = config(65536, fpdt={"offload": "host"})
    assert faults(host, ranks=8, host=2**29) == [
        "Host memory: 8 ranks x 100.0 MiB = 800.0 MiB are needed; 512.0 MiB are available. Use `fpdt.offload: disk`, "
        "or set `fpdt.save_attention: none` (64.0 MiB), or more `parallel.context` ranks."
    ]
    assert not faults(host, host=2**29)


def test_the_smaller_choice_that_is_offered_keeps_the_keys_where_they_are() -> None:
    run = config(65536, fpdt={"offload": "host"})
    plan = resolve_execution(run, arch_of(run), 65536, device_bytes=0)
    assert plan.stream is not None and plan.stream.kv == "offload"
    (fault,) = tier_faults(plan, run, arch_of(run), ranks_per_node=1, host_bytes=0)
    assert "set `fpdt.save_attention: none` (80.0 MiB)" in fault  # 64 MiB of inputs, 16 MiB of keys


def test_the_plan_is_told_in_words() -> None:
    run = config(65536, parallel={"context": 4}, fpdt={"offload": "host"})
    words = "\n".join(execution_words(resolve_execution(run, arch_of(run), 65536), run, "cpu"))
    assert "context: ulysses: 4 ranks exchange tokens for heads" in words
    assert "65,536 tokens in 4 chunks of 16,384; the MLP takes 8,192 tokens at a time, the loss 1,024" in words
    assert "`fpdt.offload: host` on a CPU device costs a copy and saves nothing; `disk` would" in words
    ring = config(65536, parallel={"context": 4, "context_method": "ring"}, overlap={"context": False})
    words = "\n".join(execution_words(resolve_execution(ring, arch_of(ring), 65536), ring, "cuda"))
    assert (
        "circle over 4 ranks" in words
        and "balance of one full document 1.00" in words
        and "every message is waited for" in words
    )
    plain = config(65536)
    assert not list(execution_words(resolve_execution(plain, arch_of(plain), 65536), plain, "cpu"))
