"""Bytes of a streamed run: every formula by hand, and their sum against what is alive during a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from freight.memory.slots import Slots
from freight.memory.stores import HostStore
from freight.memory.stream_sizes import StreamSizes
from freight.memory.streaming import Stream, StreamingRunner
from freight.nn.loss_head import ChunkedLossHead
from freight.ops.streamed_cross_entropy import RowStream
from freight.planner import stream_memory as memory
from freight.planner.stream_memory import StreamShape, device_bytes, tier_bytes
from tests.memory.live_bytes import LiveBytes
from tests.memory.running import batch_of
from tests.nn.small_decoders import build

CPU = torch.device("cpu")
SHAPE = StreamShape(
    tokens=1000,
    ranks=2,
    chunk_tokens=100,
    ffn_chunk_tokens=40,
    loss_chunk_tokens=10,
    layers=3,
    hidden=12,
    ffn=30,
    heads=6,
    groups=2,
    head_dim=2,
    vocab=50,
    element_bytes=2,
)
PRE, POST = 12 + 12 * 2 * (6 + 4), 12 * 12 + 12 + 3 * 12 * 30


def test_terms_by_hand() -> None:
    assert memory.gathered_weights(SHAPE, 3) == 2 * (3 * (PRE + POST) + 50 * 12 + 12)
    assert memory.gathered_weights(SHAPE, 0) == 2 * (50 * 12 + 12)
    assert memory.gathered_last(SHAPE) == 2 * (PRE + POST)
    assert memory.integers(SHAPE) == 24 * 500 + 9 * 1500
    assert memory.rotations(SHAPE) == 10 * 50 * 2 * 4
    assert memory.hidden_slots(SHAPE) == 7 * 50 * 12 * 2
    assert memory.saved_slots(SHAPE) == 2 * (50 * 6 * 2 * 2 + 100 * 3 * 4)
    assert memory.chunk_heads(SHAPE) == 2 * 50 * 10 * 2 * 2
    assert memory.row_gradients(SHAPE) == 100 * 3 * 2 * (4 + 2) + 2 * 100 * 1 * 2 * 2
    assert memory.head_gradients(SHAPE) == 50 * 2 * (6 * 4 + 8 * 2) + 3 * 50 * 12 * 2
    assert memory.normed_inputs(SHAPE) == 50 * 12 * 2
    assert memory.context_gradient(SHAPE) == 50 * 6 * 2 * 2
    assert memory.exchanged_outputs(SHAPE) == 2 * 100 * 3 * 2 * 2
    kept, home = 2 * (3 * 12 + 10 * 2) * 2, 2 * 10 * 2 * 4
    assert memory.under_way(SHAPE) == 50 * (kept + 2 * 3 * 6 * 2 * 2 + home)
    assert memory.under_way(replace(SHAPE, save_attention="none")) == 50 * (kept + 2 * 6 * 2 * 2 + home)
    assert memory.under_way(replace(SHAPE, overlap=False)) == 0
    assert memory.key_values(SHAPE) == 2 * 1000 * 1 * 2 * (2 + 4)
    assert memory.ffn_activations(SHAPE) == 20 * (6 * 30 + 4 * 12) * 2
    assert memory.weight_sums(SHAPE) == 4 * (PRE + POST)
    assert memory.weight_gradient(SHAPE) == 2 * 12 * 30 and memory.query_gradient(SHAPE) == 2 * 12 * 6 * 2
    assert memory.finished_gradients(SHAPE, 2) == 4 * 2 * (PRE + POST) // 2
    assert memory.reduction(SHAPE, 600, 12) == 4 * 600 * 2 + 4 * 300 + 4 * 12
    assert memory.reduced(SHAPE) == 4 * (PRE + POST)
    assert memory.head_gradient(SHAPE) == 4 * 50 * 12
    assert memory.loss_range(SHAPE) == 4 * 5 * 50 + 5 * 50 * 12 * 2


def test_terms_of_one_rank_of_a_short_row_and_of_what_is_not_kept() -> None:
    alone = replace(SHAPE, ranks=1, tokens=60, save_attention="none", kv="offload", read_slots=1)
    assert memory.saved_slots(alone) == memory.gathered_last(alone) == 0
    assert memory.reduction(alone, 600, 12) == memory.reduced(alone) == 0
    assert memory.hidden_slots(alone) == 3 * 60 * 12 * 2
    assert memory.chunk_heads(alone) == 60 * 10 * 2 * 2
    assert memory.exchanged_outputs(alone) == memory.under_way(alone) == 0
    assert memory.key_values(alone) == 2 * 60 * 2 * 2 * (2 + 4)
    assert memory.key_values(replace(alone, tokens=1000)) == 2 * 200 * 2 * 2 * (2 + 4)
    assert memory.ffn_activations(replace(alone, ffn_chunk_tokens=100)) == 60 * (6 * 30 + 4 * 12) * 2


def test_a_row_seven_times_as_long_adds_keys_and_integers_alone() -> None:
    long = replace(SHAPE, tokens=7000, chunk_tokens=100)
    many = replace(SHAPE, tokens=3500)  # both keep as many rotations as they may
    grown = memory.key_values(long) + memory.integers(long) - memory.key_values(many) - memory.integers(many)
    assert device_bytes(long) - device_bytes(many) == grown


@pytest.mark.parametrize("kept", ["none", "context", "all"])
@pytest.mark.parametrize("kv", ["device", "offload"])
def test_the_tier_is_what_its_slots_are(kept: Any, kv: Any) -> None:
    shape = replace(SHAPE, tokens=1024, chunk_tokens=128, heads=8, head_dim=32, save_attention=kept, kv=kv)
    sizes = StreamSizes(Stream(128, 40, kv, kept), 1024, 3, 12, 8, 2, 32, torch.bfloat16, ranks=2)
    # The slots come in whole cache lines, which these sizes fill.
    assert tier_bytes(shape) == Slots(sizes.slabs()).total_bytes


def measured(shape: StreamShape) -> int:
    """Most bytes alive during a step of one rank, its batch included, its parameters and tier not."""
    model, _ = build(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        vocab_size=shape.vocab,
        # Tied gradients are added in place by autograd, except while ops are watched: then it makes a third tensor.
        tie_embeddings=False,
    )
    stream = Stream(shape.chunk_tokens, shape.ffn_chunk_tokens, shape.kv, shape.save_attention)
    sizes = StreamSizes(
        stream, shape.tokens, shape.layers, shape.hidden, shape.heads, shape.groups, shape.head_dim, torch.float64
    )
    with HostStore(sizes.slabs(), CPU) as store:
        model.use_runner(StreamingRunner(stream, store))
        head = ChunkedLossHead(shape.loss_chunk_tokens, stream=RowStream(store, shape.chunk_tokens))
        batch = batch_of((shape.tokens,), vocab=shape.vocab)
        with LiveBytes(lambda tensor: not store.holds(tensor)) as live:
            model(batch, head).objective.backward()
    return live.peak + 3 * 8 * shape.tokens


# A host store copies when it is asked to, so there is one read slot.
TINY = StreamShape(64, 1, 16, 8, 4, 2, 32, 64, 4, 2, 8, 32, 8, read_slots=1)
WIDE = {
    "balanced": TINY,
    "feed-forward": replace(TINY, ffn=256, ffn_chunk_tokens=16),
    "vocabulary": replace(TINY, vocab=1024),
    "heads": replace(TINY, chunk_tokens=64, tokens=128, heads=8, groups=8, head_dim=4, ffn=16),
}


@pytest.mark.parametrize("name", WIDE)
def test_formula_is_within_a_tenth_of_what_is_alive(name: str) -> None:
    assert device_bytes(WIDE[name], gathered=False) == pytest.approx(measured(WIDE[name]), rel=0.1)


@pytest.mark.parametrize(("kv", "kept"), [("device", "context"), ("offload", "none")])
def test_formula_follows_the_row_and_the_rest_stays(kv: Any, kept: Any) -> None:
    rest = []
    for tokens in (48, 96, 192):
        shape = replace(TINY, tokens=tokens, kv=kv, save_attention=kept)
        found = measured(shape)
        assert device_bytes(shape, gathered=False) == pytest.approx(found, rel=0.1)
        grows = memory.integers(shape) + memory.rotations(shape)
        rest.append(found - grows - (memory.key_values(shape) if kv == "device" else 0))
    assert max(rest) < 1.05 * min(rest), rest
