"""Faults of parallel, recompute, offload and fpdt that keys alone show, word for word."""

from __future__ import annotations

import pytest

from freight.config.load import load_config
from freight.errors import ConfigError
from tests.config.example import example, put, write

WRONG = [
    (
        {"fpdt.chunk_tokens": 65540, "parallel.context": 8},
        "`fpdt.chunk_tokens` must be a multiple of `parallel.context` = 8; got 65540. Use 65536 or 65544.",
    ),
    (
        {"fpdt.chunk_tokens": 0},
        "`fpdt.chunk_tokens` must be at least 1; got 0. Remove `fpdt` to switch streaming off.",
    ),
    (
        {"fpdt.chunk_tokens": 65536, "fpdt.ffn_chunk_tokens": 131072},
        "`fpdt.ffn_chunk_tokens` 131072 is larger than `fpdt.chunk_tokens` 65536. Use a value up to 65536, `auto` or "
        "null.",
    ),
    (
        {"fpdt.chunk_tokens": 64, "fpdt.loss_chunk_tokens": 100, "parallel.context": 8},
        "`fpdt.loss_chunk_tokens` must be a multiple of `parallel.context` = 8; got 100. Use 96 or 104.",
    ),
    (
        {"fpdt.chunk_tokens": 32, "fpdt.loss_chunk_tokens": 33},
        "`fpdt.loss_chunk_tokens` 33 is larger than `fpdt.chunk_tokens` 32. Use a value up to 32, `auto` or null.",
    ),
    (
        {"fpdt.ffn_chunk_tokens": 0},
        "`fpdt.ffn_chunk_tokens` must be at least 1; got 0. Use null for a whole chunk.",
    ),
    (
        {"fpdt": {}, "recompute.granularity": "full"},
        "`recompute.granularity` is full while `fpdt` is set; the stream already recomputes every block. Remove "
        "`recompute`.",
    ),
    (
        {"fpdt": {}, "offload.layer_inputs": "host"},
        "`offload.layer_inputs` is host while `fpdt` is set; the stream keeps layer inputs itself. Remove it and set "
        "`fpdt.offload: host`.",
    ),
    (
        {"fpdt.kv": "offload"},
        "`fpdt.kv: offload` needs a tier; `fpdt.offload` is none. Use `host` or `disk`.",
    ),
    (
        {"fpdt.offload": "disk"},
        "`fpdt.offload: disk` needs `offload.directory`; it is null. Set a local path.",
    ),
    (
        {"fpdt": {}, "train.loss_chunk_tokens": 64},
        "`train.loss_chunk_tokens` 64 has no effect while `fpdt` is set. Remove it, or set `fpdt.loss_chunk_tokens`.",
    ),
    (
        {"fpdt": {}, "adapter.use_dora": True},
        "`adapter.use_dora` cannot run under `fpdt`: its lengths are sharded apart from their block. Set it to false, "
        "or use `recompute` instead of `fpdt`.",
    ),
    (
        {"recompute.granularity": "full", "offload.layer_inputs": "disk"},
        "`offload.layer_inputs: disk` needs `offload.directory`; it is null. Set a local path.",
    ),
    (
        {"offload.layer_inputs": "host"},
        "`offload.layer_inputs` host has no effect without `recompute`. Remove it, or set `recompute.granularity: "
        "full`.",
    ),
    (
        {"offload.prefetch_groups": 2},
        "`offload.prefetch_groups` 2 has no effect with `offload.layer_inputs: none`. Remove it.",
    ),
    (
        {"offload.directory": "/scratch"},
        "`offload.directory` /scratch has no effect: nothing goes to disk. Remove it.",
    ),
    (
        {"parallel.context_method": "ring"},
        "`parallel.context_method` has no effect with `parallel.context` 1. Remove it, or use more context ranks.",
    ),
    (
        {"parallel.ulysses": 2},
        "`parallel.ulysses` has no effect with `parallel.context` 1. Remove it, or use more context ranks.",
    ),
    (
        {"overlap.context": False},
        "`overlap.context` has no effect with `parallel.context` 1. Remove it, or use more context ranks.",
    ),
    (
        {"parallel.context": 3, "train.micro_batch_tokens": 256},
        "`train.micro_batch_tokens` must be a multiple of `parallel.context` = 3; got 256. Use 255 or 258.",
    ),
    (
        {"parallel.tensor": 2},
        "`parallel.tensor` (tensor parallelism) is not available in this version of Freight; remove it.",
    ),
    (
        {"recompute.granularity": "selective"},
        "`recompute.granularity: selective` is not available in this version of Freight; remove it.",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG)
def test_a_wrong_key_is_one_sentence(tmp_path, changes, sentence):
    raw = example(tmp_path)
    for key, value in changes.items():
        put(raw, key, value)
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, raw))
    assert sentence in caught.value.faults
    assert sentence.endswith(".") and len(caught.value.faults) <= 2


@pytest.mark.parametrize(
    "changes",
    [
        {"fpdt": {}},
        {"fpdt": {"chunk_tokens": 32, "ffn_chunk_tokens": None, "loss_chunk_tokens": "auto"}},
        {"fpdt": {"offload": "disk"}, "offload": {"directory": "/scratch"}},
        {"recompute": {"granularity": "full"}, "offload": {"layer_inputs": "host", "prefetch_groups": 2}},
        {"parallel": {"context": 2, "context_method": "ulysses"}, "overlap": {"context": False}},
    ],
)
def test_a_right_combination_passes(tmp_path, changes):
    load_config(write(tmp_path, example(tmp_path) | changes))
