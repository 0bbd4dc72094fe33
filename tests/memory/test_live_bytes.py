"""What is on the device while a model learns: predicted from shapes, and the same for any length of the row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freight.memory.recompute import RecomputeRunner
from freight.memory.slots import Slab
from freight.memory.stores import HostStore
from freight.memory.stream_sizes import StreamSizes
from freight.memory.streaming import Stream, StreamingRunner
from freight.nn.block import PlainRunner
from freight.nn.decoder import Decoder
from freight.nn.loss_head import ChunkedLossHead
from freight.ops.protocols import BlockRunner, TensorStore
from freight.ops.streamed_cross_entropy import RowStream
from tests.memory.live_bytes import LiveBytes
from tests.memory.running import batch_of
from tests.nn.small_decoders import build

CHUNK, LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM = 16, 2, 16, 4, 2, 4
CPU = torch.device("cpu")


def peak(model: Decoder, runner: BlockRunner, store: TensorStore, tokens: int, head: ChunkedLossHead | None) -> int:
    """Most bytes alive during a step, beyond parameters and what is on the tier."""
    batch = batch_of((tokens,))
    model.use_runner(runner)
    with LiveBytes(lambda tensor: not store.holds(tensor)) as live:
        model(batch, head).objective.backward()
    model.zero_grad()
    return live.peak


def streamed_peak(stream: Stream, tokens: int) -> int:
    model, _ = build(num_layers=LAYERS, num_query_groups=GROUPS)
    sizes = StreamSizes(stream, tokens, LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, torch.float64)
    with HostStore(sizes.slabs(), CPU) as store:  # the slots are just enough
        head = ChunkedLossHead(4, stream=RowStream(store, CHUNK))
        return peak(model, StreamingRunner(stream, store), store, tokens, head)


def integers(tokens: int) -> int:
    """Numbers of tokens and documents, and their masks."""
    return tokens * (8 + 8 + 1)


@pytest.mark.parametrize("kept", ["none", "context", "all"])
def test_with_keys_on_the_tier_the_device_holds_no_more_for_longer_rows(kept: str) -> None:
    short, long = (
        streamed_peak(Stream(CHUNK, 8, "offload", kept), tokens) - integers(tokens)  # type: ignore[arg-type]
        for tokens in (64, 128)
    )
    assert abs(long - short) < 0.05 * short, (short, long)


def test_keys_on_the_device_are_all_that_grows_with_the_row() -> None:
    def rest(tokens: int) -> int:
        # K, V and their gradients of one layer, all float64 here
        return streamed_peak(Stream(CHUNK, 8), tokens) - integers(tokens) - 4 * tokens * GROUPS * HEAD_DIM * 8

    short, long = (rest(tokens) for tokens in (64, 128))
    assert abs(long - short) < 0.05 * short, (short, long)


def test_a_window_bounds_keys_on_the_device() -> None:
    def windowed(tokens: int) -> int:
        model, _ = build(num_layers=1, sliding_window=10, num_query_groups=GROUPS)
        stream = Stream(CHUNK, 8)
        sizes = StreamSizes(stream, tokens, 1, HIDDEN, HEADS, GROUPS, HEAD_DIM, torch.float64)
        with HostStore(sizes.slabs(), CPU) as store:
            head = ChunkedLossHead(4, stream=RowStream(store, CHUNK))
            return peak(model, StreamingRunner(stream, store), store, tokens, head) - integers(tokens)

    short, long = windowed(48), windowed(112)
    assert abs(long - short) < 0.05 * short, (short, long)


def test_recompute_keeps_one_input_per_block_and_offload_none() -> None:
    tokens, layers = 128, 5
    model, _ = build(num_layers=layers, max_position_embeddings=tokens)
    one = tokens * HIDDEN * 8
    after_forward, peaks = [], []
    with HostStore({"input": Slab(layers, one)}, CPU) as store:
        for runner in (PlainRunner(), RecomputeRunner(), RecomputeRunner(store)):
            batch = batch_of((tokens,))
            model.use_runner(runner)
            with LiveBytes(lambda tensor: not store.holds(tensor)) as live:
                loss = model(batch).objective
                after_forward.append(live.now())
                loss.backward()
            del loss
            model.zero_grad()
            peaks.append(live.peak)
    plain, kept, offloaded = after_forward
    assert kept - offloaded == layers * one and offloaded < 4 * one < plain / 10
    assert peaks[2] <= peaks[1] < peaks[0] / 2


def test_live_bytes_sees_what_is_alive_and_what_is_gone() -> None:
    with LiveBytes() as live:
        x = torch.zeros(1000, dtype=torch.float64)
        view: Tensor = x[:10]
        y = x + 1
        del x
        z = y + view.sum()
        del y, view
    assert live.peak >= 3 * 8000 and live.now() == 8000
    del z
    assert live.now() == 0
