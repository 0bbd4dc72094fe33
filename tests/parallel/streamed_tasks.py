"""Streamed blocks on ranks that share their tokens; importable, because ranks are other processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from freight.memory.stores import DeviceStore, HostStore
from freight.memory.streaming import Stream, StreamingRunner
from freight.nn.decoder import Decoder
from freight.ops.batch import TokenBatch
from freight.ops.layout import SequenceLayout
from freight.ops.protocols import HeadTransport, Pending
from freight.parallel.data import shard, whole
from freight.parallel.mesh import Axis, build_mesh
from tests.memory.running import SLABS, freeze_all_but
from tests.nn.small_decoders import build
from tests.parallel.training_tasks import transport_of

CHUNK_TOKENS = 8


@dataclass(frozen=True)
class Way:
    """How a tiny decoder is streamed.

    Args:
        kept: `save_attention`.
        kv: Where keys and values are.
        model: Changes of the decoder.
        lengths: Of the documents; padded to six chunks.
        trained: Parts of the names of what is trained.
    """

    kept: Literal["none", "context", "all"] = "context"
    kv: Literal["device", "offload"] = "device"
    model: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (48,)
    trained: tuple[str, ...] = ("",)

    def build(self) -> tuple[Decoder, TokenBatch]:
        """The decoder and its batch."""
        model, _ = build(**self.model)
        freeze_all_but(model, *self.trained)
        generator = torch.Generator().manual_seed(3)
        documents = [torch.randint(0, 31, (n,), generator=generator).tolist() for n in self.lengths]
        return model, TokenBatch.from_documents(documents, pad_to=48, seed=1)


class Watched:
    """A transport that knows how many of its exchanges are under way.

    Args:
        transport: That does the work.
    """

    def __init__(self, transport: HeadTransport) -> None:
        self._transport = transport
        self.under_way = self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def start_scatter_heads(self, *tensors: Tensor, kv: int = 0) -> Pending:
        return self._begun(self._transport.start_scatter_heads(*tensors, kv=kv))

    def start_gather_heads(self, *tensors: Tensor, kv: int = 0) -> Pending:
        return self._begun(self._transport.start_gather_heads(*tensors, kv=kv))

    def _begun(self, pending: Pending) -> Pending:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return _Watched(self, pending)


@dataclass(frozen=True)
class _Watched:
    transport: Watched
    pending: Pending

    def wait(self) -> tuple[Tensor, ...]:
        self.transport.under_way -= 1
        return self.pending.wait()


@dataclass
class Seen:
    """What one rank saw.

    Args:
        gradients: Loss of all ranks, and whole gradients.
        exchanges: How often this rank exchanged heads.
        most: Exchanges that were under way at one time.
    """

    gradients: dict[str, Tensor]
    exchanges: int
    most: int


def gradients(ranks: int, row: int, ways: list[Way], overlap: bool) -> list[Seen]:
    """Each way, on ranks that share the tokens in rows of so many."""
    mesh = build_mesh(ranks, context=ranks)
    found = []
    for way in ways:
        model, batch = way.build()
        arch, rank = model.arch, mesh[Axis.CP].get_local_rank()
        shard(model, model.layers, mesh, "fp64")
        layout = SequenceLayout(
            "interleaved", batch.stream_tokens, ranks, batch.cu_seqlens, chunk_tokens=CHUNK_TOKENS, row=row
        )
        stream = Stream(CHUNK_TOKENS, 4, way.kv, way.kept, overlap)
        with HostStore(SLABS, torch.device("cpu")) if way.kv == "offload" else DeviceStore() as store:
            transport = Watched(transport_of(arch, mesh, row))
            model.use_runner(StreamingRunner(stream, store, transport=cast(HeadTransport, transport)))
            with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanges:
                loss = model(batch.local(layout, rank)).objective
                loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        of_model = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        assert transport.under_way == 0
        found.append(Seen({"loss": total} | of_model, exchanges.call_count, transport.most))
    return found
