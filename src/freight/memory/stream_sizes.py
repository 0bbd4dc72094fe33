"""How many slots of which size a streamed run needs on its tier, from integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freight.memory.slots import Slab
from freight.memory.stream import Stream
from freight.ops.attention_math import working_dtype


@dataclass(frozen=True)
class StreamSizes:
    """One rank's share of a streamed run.

    Args:
        stream: Chunks, and what is kept.
        tokens: Of a microbatch, over all ranks that share them.
        layers: Blocks that run here.
        hidden_size: Of hidden states.
        heads: Query heads of this rank before heads are exchanged.
        groups: Key-value heads, likewise.
        head_dim: Of each head.
        dtype: Of forward and backward.
        ranks: That share the tokens.
        rows: Of ranks; within a row tokens are exchanged for heads, across rows keys are gathered.
        keys_here: Key-value heads of a rank after the exchange, where that is more than its share rounded up.
        microbatches: Whose backward is still to come, at most.
    """

    stream: Stream
    tokens: int
    layers: int
    hidden_size: int
    heads: int
    groups: int
    head_dim: int
    dtype: torch.dtype
    ranks: int = 1
    rows: int = 1
    keys_here: int | None = None
    microbatches: int = 1

    @property
    def key_value_bytes(self) -> int:
        """Bytes of the keys and values of one layer, and of their gradients, on one rank."""
        return self.tokens * self._keys * self.head_dim * 2 * (self.dtype.itemsize + working_dtype(self.dtype).itemsize)

    @property
    def _keys(self) -> int:
        return self.keys_here or -(-self.groups // (self.ranks // self.rows))

    def slabs(self) -> dict[str, Slab]:
        """Of a host or disk store; by kind as the runner names them."""
        here, wide = self.dtype.itemsize, working_dtype(self.dtype).itemsize
        chunk, chunks = min(self.stream.chunk_tokens, self.tokens), -(-self.tokens // self.stream.chunk_tokens)
        kept = self.microbatches * self.layers * chunks
        heads = -(-self.heads // (self.ranks // self.rows))
        # Inputs of all blocks, what the last one returns, and one gradient that goes from block to block.
        slabs = {
            "hidden": Slab(self.microbatches * self.layers + 2, self.tokens // self.ranks * self.hidden_size * here)
        }
        if self.stream.save_attention != "none":
            slabs["context"] = Slab(kept, chunk // self.ranks * self.heads * self.head_dim * here)
            slabs["lse"] = Slab(kept, chunk // self.rows * heads * wide)
        rows = chunk * self._keys * self.head_dim
        of_keys = (chunks if self.stream.kv == "offload" else 0) + (kept if self.stream.save_attention == "all" else 0)
        slabs |= {name: Slab(of_keys, rows * here) for name in ("k", "v") if of_keys}
        if self.stream.kv == "offload":
            slabs |= {name: Slab(chunks, rows * wide) for name in ("dk", "dv")}
        return slabs
