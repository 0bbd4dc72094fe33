"""One try of the streaming benchmark on one rank: a model, a way to run it, a few optimizer steps, and their memory.

Every try is a process of its own, which has only run a few tokens to have kernels, threads and connections there, so
that its resident memory is that of one side at one length. The three sides are

- `plain`: everything stays for backward, and the loss has all logits;
- `recompute`: every block again in backward, its input on the tier meanwhile, and the loss in chunks;
- `streamed`: every block chunk by chunk, on the same tier.

Ranks share the tokens by exchanging heads on all sides. A thread looks at the resident memory every few milliseconds
and ends the process when it is above the cap, long before the machine would suffer. Linux only: it reads `/proc`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freight.config.architecture import Architecture
from freight.config.schema import OptimizerConfig
from freight.memory.recompute import RecomputeRunner
from freight.memory.slots import Slab
from freight.memory.stores import Tier, open_store
from freight.memory.stream_sizes import StreamSizes
from freight.memory.streaming import Stream, StreamingRunner
from freight.nn.decoder import Decoder
from freight.nn.init import init_weights
from freight.nn.loss_head import ChunkedLossHead, LogitsHead
from freight.ops.attention import LocalAttention
from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.ops.layout import LayoutKind, SequenceLayout
from freight.ops.protocols import LossSums, TensorStore
from freight.ops.streamed_cross_entropy import RowStream
from freight.parallel.context import ContextAttention
from freight.parallel.context_method import choose_context_method
from freight.parallel.data import shard
from freight.parallel.head_transport import UlyssesTransport
from freight.parallel.local_group import local_group
from freight.parallel.mesh import Axis, DeviceMesh
from freight.train.optimizer import build_optimizer
from freight.train.step import train_step

Side = Literal["plain", "recompute", "streamed"]

OVER_CAP = 77  # exit code
WATCH_SECONDS = 0.02
SEED = 1
WARM_UP_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """What is trained: the decoder and its ranks.

    Args:
        ranks: Processes that share the tokens.
        layers: Blocks.
        hidden: Width of hidden states.
        ffn: Width inside the MLP.
        heads: Query heads.
        groups: Key-value heads.
        vocab: Rows of the embedding, which is the head too.
    """

    ranks: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int

    def architecture(self) -> Architecture:
        """As a decoder."""
        return Architecture(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            vocab_size=self.vocab,
        )


@dataclass(frozen=True)
class Chunks:
    """Sizes and places that the sides are told.

    Args:
        chunk: Tokens of a streamed chunk, over all ranks.
        ffn: Tokens that go through the feed-forward part at one time, likewise.
        loss: Label tokens whose logits exist at one time, likewise.
        kv: Where a streamed layer's keys and values are.
        tier: Where what backward needs goes.
    """

    chunk: int
    ffn: int
    loss: int
    kv: Literal["device", "offload"]
    tier: Tier


@dataclass(frozen=True)
class Try:
    """What a process is to do.

    Args:
        side: How blocks are run.
        tokens: Of the one document.
        shape: Of the model.
        chunks: Of the sides that have them.
        save_attention: What the streamed side keeps of attention.
        steps: Optimizer steps.
        cap_bytes: Resident memory at which it ends; 0 = no end.
        folder: For the tier's file.
        timeout_seconds: Of every collective.
    """

    side: Side
    tokens: int
    shape: Shape
    chunks: Chunks
    save_attention: Literal["none", "context", "all"] = "context"
    steps: int = 1
    cap_bytes: int = 0
    folder: str = "."
    timeout_seconds: float = 600.0

    @classmethod
    def read(cls, text: str) -> Try:
        """Of the JSON that `dataclasses.asdict` gives."""
        fields = json.loads(text)
        return cls(**fields | {"shape": Shape(**fields["shape"]), "chunks": Chunks(**fields["chunks"])})


class DenseLossHead:
    """Cross-entropy over the logits of all tokens, as torch has it; a `LossHead`."""

    def __call__(self, hidden: Tensor, norm: nn.Module, weight: Tensor, batch: TokenBatch) -> LossSums:
        """`hidden [tokens, hidden]`, `weight [vocab, hidden]` -> sums."""
        logits = LogitsHead()(hidden, norm, weight, batch)
        objective = F.cross_entropy(logits, batch.labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return LossSums(objective, objective.detach())


def attempt(rank: int, meeting: Path, this: Try) -> dict[str, Any]:
    """Build, and take the steps.

    Args:
        rank: Of this process.
        meeting: Where the ranks find each other.
        this: What to do.

    Returns:
        `loss` of the first step, `seconds` of every step, `fixed_bytes` (resident after building and a pass over some
        tokens), `peak_bytes` (most resident while stepping), and of the tier `tier_bytes`, `moved_bytes` and
        `wait_seconds`.
    """
    torch.set_num_threads(1)
    with local_group(meeting, rank, this.shape.ranks, this.timeout_seconds) as mesh:
        arch = this.shape.architecture()
        with torch.device("meta"):
            model = Decoder(arch)
        shard(model, model.layers, mesh, "fp32")
        model.to_empty(device="cpu")
        init_weights(model, SEED)
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-4))
        batch = document(this.tokens, this.shape.vocab)
        with running(model, this, mesh) as (deal, store, tier_bytes):
            mine = deal(batch)
            del batch
            # Kernels, threads and connections take memory when they are first used, whatever the length.
            model(deal(document(min(WARM_UP_TOKENS, this.tokens), this.shape.vocab))).objective.backward()
            model.zero_grad(set_to_none=True)
            gc.collect()
            fixed = reset_peak()
            watch(this.cap_bytes)
            seconds, losses = [], []
            for _ in range(this.steps):
                began = time.perf_counter()
                step = train_step(
                    model,
                    optimizer,
                    [mine],
                    this.tokens,
                    learning_rate=1e-4,
                    grad_clip=None,
                    mesh=mesh,
                    device=torch.device("cpu"),
                )
                seconds.append(time.perf_counter() - began)
                losses.append(step.loss)
            peak = resident("VmHWM")
            end_above(this.cap_bytes, peak)
            return {
                "loss": losses[0],
                "seconds": seconds,
                "fixed_bytes": fixed,
                "peak_bytes": peak,
                "tier_bytes": tier_bytes,
                "moved_bytes": 0 if store is None else store.bytes_in + store.bytes_out,
                "wait_seconds": 0.0 if store is None else store.wait_seconds,
            }


def document(tokens: int, vocab: int) -> TokenBatch:
    """One document of random tokens, each the label of the one before."""
    ids = torch.randint(0, vocab, (tokens + 1,), generator=torch.Generator().manual_seed(SEED))
    return TokenBatch(ids[:-1].clone(), ids[1:].clone(), torch.arange(tokens), (0, tokens), (tokens,))


@contextmanager
def running(
    model: Decoder, this: Try, mesh: DeviceMesh
) -> Iterator[tuple[Callable[[TokenBatch], TokenBatch], TensorStore | None, int]]:
    """Have the model run the way of a side; gives what deals out a batch, the store, and bytes of its slots."""
    shape, chunks, arch = this.shape, this.chunks, model.arch
    loss_rows = max(chunks.loss // shape.ranks, 1)
    if this.side == "streamed":
        stream = Stream(chunks.chunk, min(chunks.ffn, chunks.chunk), chunks.kv, this.save_attention)
        sizes = StreamSizes(
            stream,
            this.tokens,
            shape.layers,
            shape.hidden,
            shape.heads,
            shape.groups,
            arch.dims_per_head,
            torch.float32,
            ranks=shape.ranks,
        )
        slabs = sizes.slabs()
        transport = UlyssesTransport(shape.heads, shape.groups, mesh[Axis.CP].get_group())
        with open_store(chunks.tier, slabs, directory=this.folder) as store:
            model.use_runner(StreamingRunner(stream, store, transport=transport))
            piece = chunks.chunk // shape.ranks
            model.loss_head = ChunkedLossHead(loss_rows, stream=RowStream(store, piece))
            yield partial(in_chunks, chunk_tokens=chunks.chunk, mesh=mesh), store, _size(slabs)
        return
    deal = share_heads(model, mesh, this.tokens) if shape.ranks > 1 else _whole
    if this.side == "plain":
        model.loss_head = DenseLossHead()
        yield deal, None, 0
        return
    slabs = {"input": Slab(shape.layers, this.tokens // shape.ranks * shape.hidden * 4)}
    with open_store(chunks.tier, slabs, directory=this.folder) as store:
        model.use_runner(RecomputeRunner(store))
        model.loss_head = ChunkedLossHead(loss_rows)
        yield deal, store, _size(slabs)


def in_chunks(batch: TokenBatch, chunk_tokens: int, mesh: DeviceMesh) -> TokenBatch:
    """This rank's part of every chunk."""
    axis = mesh[Axis.CP]
    layout = SequenceLayout(
        LayoutKind.INTERLEAVED, batch.stream_tokens, axis.size(), batch.cu_seqlens, chunk_tokens=chunk_tokens
    )
    return batch.local(layout, axis.get_local_rank())


def share_heads(model: Decoder, mesh: DeviceMesh, tokens: int) -> Callable[[TokenBatch], TokenBatch]:
    """Attention with heads exchanged between the ranks; gives what deals out a batch of so many tokens."""
    arch, ranks = model.arch, mesh[Axis.CP].size()
    choice = choose_context_method(
        "ulysses",
        ranks=ranks,
        heads=arch.num_attention_heads,
        groups=arch.groups,
        ranks_per_node=ranks,
        windows=[None],
        local_tokens=tokens // ranks,
    )
    core = ContextAttention(choice, mesh, cast(LocalAttention, LocalAttention()))
    for block in model.blocks:
        block.attention_core = core
    return core.shard


def _whole(batch: TokenBatch) -> TokenBatch:
    return batch


def _size(slabs: dict[str, Slab]) -> int:
    return sum(slab.slots * slab.slot_bytes for slab in slabs.values())


def reset_peak() -> int:
    """Have the kernel forget the peak so far; returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: Literal["VmRSS", "VmHWM"]) -> int:
    """Bytes of this process in memory, now or at most; pages of files that are mapped among them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; the benchmark needs Linux.")


def watch(cap: int) -> None:
    """End this process as soon as it is above the cap, if there is one."""

    def look() -> None:
        while True:
            end_above(cap, resident("VmRSS"))
            time.sleep(WATCH_SECONDS)

    if cap:
        threading.Thread(target=look, daemon=True).start()


def end_above(cap: int, found: int) -> None:
    """End at once: other ranks may wait in a collective, and no cleaning up is worth more memory."""
    if cap and found > cap:
        os._exit(OVER_CAP)


def main() -> None:
    """Be the rank of the first argument, meet in the file of the second, do what the third says, print the result."""
    print(json.dumps(attempt(int(sys.argv[1]), Path(sys.argv[2]), Try.read(sys.argv[3]))))  # noqa: T201 - read by the benchmark


if __name__ == "__main__":
    main()
