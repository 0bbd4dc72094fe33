"""A streamed block equals the plain one: loss and every gradient, whatever the chunks and tiers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from freight.errors import ConfigError
from freight.memory.key_values import ResidentKeyValues
from freight.memory.stores import DeviceStore, HostStore, Key, open_store
from freight.memory.streaming import Stream, StreamingRunner
from freight.nn.block import PlainRunner
from freight.nn.decoder import Decoder
from freight.nn.loss_head import ChunkedLossHead
from freight.ops.protocols import RowStore
from freight.ops.streamed_cross_entropy import RowStream
from freight.parallel.data import shard, whole
from freight.parallel.mesh import build_mesh
from freight.verify.ranks import RankPool
from tests.memory.running import (
    ONE,
    PACKED,
    SLABS,
    assert_close,
    assert_equal,
    batch_of,
    freeze_all_but,
    gradients,
)
from tests.nn.small_decoders import VARIANTS, build

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped": VARIANTS["llama"],
    "multi-query": VARIANTS["multi-query"],
    "window and softcap": VARIANTS["gemma2"],
    "narrow window": VARIANTS["qwen2"],
    "wide window": dict(sliding_window=6, num_query_groups=1),
    "layernorm and biases": VARIANTS["gpt2"],
    "dropout": dict(attention_dropout=0.4, num_query_groups=2),
}
# 15 tokens: one chunk, an uneven tail, an even cut, a tail of one token, many chunks.
CHUNKS = (15, 8, 5, 7, 3)
KEPT = ("none", "context", "all")


def head_of(model: Decoder, store: RowStore, tokens: int) -> ChunkedLossHead:
    """A head that never holds more tokens than that."""
    return ChunkedLossHead(2, model.arch.final_softcap, stream=RowStream(store, tokens))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [ONE, PACKED])
def test_loss_and_gradients_equal_the_plain_run(name: str, lengths: tuple[int, ...]) -> None:
    model, _ = build(**MODELS[name])
    expected = gradients(model, PlainRunner(), batch_of(lengths, 15))
    for i, (chunk, kept) in enumerate(product(CHUNKS, KEPT)):
        stored = i % 2 == 1
        with HostStore(SLABS, CPU) if stored else DeviceStore() as store:
            stream = Stream(chunk, (None, 2, 4)[i % 3], "offload" if stored else "device", kept)
            head = head_of(model, store, chunk) if i % 4 else None
            found = gradients(model, StreamingRunner(stream, store), batch_of(lengths, 15), head)
            assert_close(found, expected)


def test_every_tier_gives_the_same_bits_and_is_empty_afterwards(tmp_path: Path) -> None:
    model, _ = build(**MODELS["grouped"])
    first: dict[str, dict[str, Tensor]] = {}
    for kept, tier, kv in product(KEPT, ("none", "host", "disk"), ("device", "offload")):
        if (tier, kv) == ("none", "offload"):
            continue
        with open_store(tier, SLABS, directory=tmp_path) as store:
            runner = StreamingRunner(Stream(4, 3, kv, kept), store)
            found = gradients(model, runner, batch_of(PACKED, 15), head_of(model, store, 5))
            assert_equal(gradients(model, runner, batch_of(PACKED, 15), head_of(model, store, 5)), found)
            assert not (store._tensors if isinstance(store, DeviceStore) else store._slots._taken)
        if kv == "device":
            assert_equal(found, first.setdefault(kept, found))
        else:  # blocks in another order: other roundings, but the same for both tiers
            assert_equal(found, first.setdefault(kept + kv, found))


def test_without_gradients_nothing_is_kept() -> None:
    model, _ = build()
    with HostStore(SLABS, CPU) as store, torch.no_grad():
        expected = model(batch_of(ONE)).nll
        model.use_runner(StreamingRunner(Stream(4, kv="offload"), store))
        assert (model(batch_of(ONE)).nll - expected).abs() < 1e-12 * expected
        assert store.bytes_out == store.bytes_in == 0


def test_a_graph_that_is_dropped_leaves_nothing() -> None:
    model, _ = build()
    with HostStore(SLABS, CPU) as store:
        model.use_runner(StreamingRunner(Stream(4, save_attention="all"), store))
        loss = model(batch_of(ONE)).objective
        assert store._slots._taken
        del loss
        assert not store._slots._taken


@pytest.mark.parametrize("trained", [("q_proj",), ("mlp",), ("layers.1",), ("embed",), ("v_proj", "norm")])
def test_what_is_frozen_gets_no_gradient_and_the_rest_is_right(trained: tuple[str, ...]) -> None:
    model, _ = build(**MODELS["grouped"], tie_embeddings=False)
    freeze_all_but(model, *trained)
    expected = gradients(model, PlainRunner(), batch_of(PACKED))
    assert len(expected) > 1
    for kept in KEPT:
        stream = Stream(4, 2, save_attention=kept)
        assert_close(gradients(model, StreamingRunner(stream, DeviceStore()), batch_of(PACKED)), expected)


def test_three_optimizer_steps_equal_the_plain_run() -> None:
    def train(runner: Any) -> dict[str, Tensor]:
        model, _ = build(**MODELS["grouped"])
        model.use_runner(runner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        found = {}
        for step in range(3):
            for microbatch in range(2):
                (model(batch_of(PACKED, seed=2 * step + microbatch)).objective / 20).backward()
            found[f"norm {step}"] = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])  # type: ignore
            optimizer.step()
            optimizer.zero_grad()
        return found | {name: parameter.detach() for name, parameter in model.named_parameters()}

    assert_close(train(StreamingRunner(Stream(5, 2), DeviceStore())), train(PlainRunner()), 1e-11)


def test_autocast_is_entered_again() -> None:
    model, _ = build()
    model = model.float()

    def run(runner: Any) -> dict[str, Tensor]:
        model.use_runner(runner)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch_of(ONE)).objective
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain, streamed = run(PlainRunner()), run(StreamingRunner(Stream(15), DeviceStore()))
    assert_close(streamed, plain, 2e-2)


def test_a_second_backward_is_refused() -> None:
    model, _ = build()
    model.use_runner(StreamingRunner(Stream(4), DeviceStore()))
    loss = model(batch_of(ONE)).objective
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_tier_is_needed_to_offload_to() -> None:
    with pytest.raises(ConfigError, match=r"`fpdt\.kv: offload` needs a tier"):
        StreamingRunner(Stream(4, kv="offload"), DeviceStore())


class CountingStore(HostStore):
    """Remembers the most keys of a kind that were kept at one time."""

    most = 0

    def put(self, key: Key, tensor: Tensor) -> None:
        super().put(key, tensor)
        self.most = max(self.most, sum(k.name == "k" for k in self._slots._taken))


@pytest.mark.parametrize(("window", "chunk"), [(4, 4), (5, 4), (6, 4), (9, 4), (1, 3), (2, 3)])
def test_a_window_frees_what_lies_behind_it(window: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build(sliding_window=window, num_layers=1)
    blocks = math.ceil((window - 1) / chunk) + 1
    expected = gradients(model, PlainRunner(), batch_of((40,)))
    with CountingStore(SLABS, CPU) as store:
        runner = StreamingRunner(Stream(chunk, kv="offload"), store)
        assert_close(gradients(model, runner, batch_of((40,))), expected)
        assert store.most == blocks
    capacities = []
    add = ResidentKeyValues.add

    def spy(self: ResidentKeyValues, number: int, k: Tensor, v: Tensor) -> None:
        add(self, number, k, v)
        capacities.append(max(buffer.shape[0] for buffer in self._buffers))

    monkeypatch.setattr(ResidentKeyValues, "add", spy)
    assert_close(gradients(model, StreamingRunner(Stream(chunk), DeviceStore()), batch_of((40,))), expected)
    assert max(capacities) == blocks * chunk


@contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever makes a host wait for a device or for other ranks raises."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("waits")

    with monkeypatch.context() as patch:
        for owner, name in [
            (torch.cuda, "synchronize"),
            (torch.Tensor, "item"),
            (torch.Tensor, "tolist"),
            (torch.Tensor, "cpu"),
            (torch.Tensor, "numpy"),
            (torch.Tensor, "nonzero"),
            (torch.Tensor, "__bool__"),
            (dist, "barrier"),
            (dist, "all_reduce"),
        ]:
            patch.setattr(owner, name, refuse)
        yield


def test_nothing_in_the_loop_waits_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build(**MODELS["window and softcap"])
    batch = batch_of(PACKED, 15)
    for kept in KEPT:
        runner = StreamingRunner(Stream(4, 3, save_attention=kept), DeviceStore())
        gradients(model, runner, batch)  # integers of the batch are made into tensors once
        hidden = model.embed(batch)
        with no_waiting(monkeypatch):
            for block in model.blocks:
                hidden = block(hidden, batch)
            hidden.sum().backward()


class CountedReductions(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def _two_ranks(trained: tuple[str, ...], streamed: bool) -> tuple[dict[str, Tensor], int]:
    world, rank = dist.get_world_size(), dist.get_rank()
    model, _ = build(num_query_groups=2)
    freeze_all_but(model, *trained)
    shard(model, model.layers, build_mesh(world), "fp64")
    if streamed:
        model.use_runner(StreamingRunner(Stream(4 + rank, 2), DeviceStore()))  # ranks may differ in their chunks
    batch = batch_of(PACKED if rank else ONE, seed=rank)
    with CountedReductions() as reductions:
        model(batch).objective.backward()
    found = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return found, reductions.count


@pytest.mark.parametrize("trained", [("",), ("q_proj", "gate_proj")])
def test_sharded_ranks_give_the_plain_gradients_with_one_reduction_per_block(
    ranks: RankPool, trained: tuple[str, ...]
) -> None:
    plain, streamed = (ranks.run(_two_ranks, 2, trained, flag, timeout_seconds=300) for flag in (False, True))
    for (expected, reductions), (found, reductions_streamed) in zip(plain, streamed, strict=True):
        assert_close(found, expected)
        assert reductions_streamed == reductions >= 2


def test_units_sharded_inside_a_block_are_refused(mesh: DeviceMesh) -> None:
    model, _ = build()
    shard(model, model.layers, mesh, "fp64", uncast=[model.blocks[0].mlp])
    model.use_runner(StreamingRunner(Stream(4), DeviceStore()))
    with pytest.raises(ConfigError, match=r"`adapter\.use_dora` cannot run under `fpdt`"):
        model(batch_of(ONE))
