"""Round trips through transports of heads; importable, because ranks are other processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from freight.ops.layout import SequenceLayout
from freight.parallel.head_transport import UlyssesTransport
from freight.parallel.mesh import Axis, build_mesh, context_axes
from freight.parallel.row_transport import RowTransport


def round_trips(cases: list[tuple[int, int]], chunk: int) -> list[dict[str, Any]]:
    """Chunks of an interleaved layout through the transport and back.

    Args:
        cases: Query heads and key-value heads.
        chunk: Tokens of a chunk of all ranks.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    group = build_mesh(world, context=world)[Axis.CP].get_group()
    layout = SequenceLayout("interleaved", 2 * chunk + world, world, chunk_tokens=chunk)
    results = []
    for heads, groups in cases:
        transport = UlyssesTransport(heads, groups, group)
        # Every number says which token and head it is.
        q, k = (
            100.0 * torch.arange(layout.tokens).view(-1, 1, 1) + torch.arange(n).view(-1, 1) for n in (heads, groups)
        )
        q, k = q[layout.index(rank)].expand(-1, -1, 2), k[layout.index(rank)].expand(-1, -1, 2)
        pieces = (chunk // world, chunk // world, 1)
        arrived, returned = [], []
        for of_q, of_k in zip(q.split(pieces), k.split(pieces), strict=True):
            there = transport.scatter_heads(of_q, of_k, -of_k, kv=2)
            (queries,) = transport.scatter_heads(of_q)
            assert torch.equal(queries, there[0])
            arrived.append([x[..., 0] for x in there])
            back = transport.gather_heads(*(x.to(torch.bfloat16) for x in (there[0] % 100, *there[1:])), kv=2)
            returned.append([x[..., 0] for x in back])
        results.append(
            dict(
                share=transport.share,
                first_head=transport.first_head,
                num_keys=transport.num_keys,
                arrived=[torch.cat(x) for x in zip(*arrived, strict=True)],
                returned=[torch.cat(x) for x in zip(*returned, strict=True)],
                sent=[q[..., 0], k[..., 0]],
            )
        )
    return results


def row_trips(heads: int, groups: int, row: int, chunk: int) -> list[dict[str, Any]]:
    """Two chunks of an interleaved layout with rows, the last one short; numbers say which token and head they are."""
    world, rank = dist.get_world_size(), dist.get_rank()
    across, within = (axis.get_group() for axis in context_axes(build_mesh(world, context=world), row))
    layout = SequenceLayout("interleaved", chunk + 2 * world, world, chunk_tokens=chunk, row=row)
    transport = RowTransport(heads, groups, within, across)
    q, k = (100.0 * torch.arange(layout.tokens).view(-1, 1, 1) + torch.arange(n).view(-1, 1) for n in (heads, groups))
    q, k = q[layout.index(rank)].expand(-1, -1, 2), k[layout.index(rank)].expand(-1, -1, 2)
    results, start = [], 0
    for tokens in (chunk, 2 * world):
        mine = slice(start // world, (start + tokens) // world)
        there = transport.scatter_heads(q[mine], k[mine], -k[mine], kv=2)
        assert torch.equal(transport.scatter_heads(q[mine])[0], there[0])
        assert torch.equal(transport.gather_heads(there[0])[0], q[mine])
        results.append(
            dict(
                share=transport.row.share,
                pieces=transport.pieces((start, start + tokens)),
                there=[x[..., 0] for x in there],
                back=[x[..., 0] for x in transport.gather_heads(*there, kv=2)],
                sent=[q[mine][..., 0], k[mine][..., 0]],
            )
        )
        start += tokens
    return results
