"""Bytes of a streamed run on one rank, from integers: what is on the device at each moment, and what is on the tier.

One small function per thing that is there, each with its formula. The peak is the largest sum over the moments of a
step, not a sum of largest things. Sharded masters and optimizer states are not counted: they do not depend on how
blocks are run. Only `key_values` (on the device) and `integers` grow with the row.

Letters of the formulas: T tokens of the row, t = T/P, P ranks, C and c = C/P tokens of a chunk on all and on one, n
tokens of a range on one, h hidden, f feed-forward, V vocabulary, L layers, H and G query and key-value heads (H', G' of
one rank after the exchange), d head_dim, r read slots, e bytes of an element, w bytes of what is summed up in (4, or 8
for float64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SHARED_ROTATIONS = 16  # chunks whose rotations a batch keeps for the next layer


@dataclass(frozen=True)
class StreamShape:
    """A streamed run: a dense decoder with a gated feed-forward part and a head tied to the embedding.

    Args:
        tokens: Of the row, over all ranks.
        ranks: That share it by exchanging heads, and among which weights and their gradients are sharded.
        chunk_tokens: Of a chunk, over all ranks.
        ffn_chunk_tokens: That go through the feed-forward part at one time, likewise.
        loss_chunk_tokens: Whose logits exist at one time, likewise.
        layers: Blocks.
        hidden: Width of hidden states.
        ffn: Width of the feed-forward part.
        heads: Query heads.
        groups: Key-value heads.
        head_dim: Of each head.
        vocab: Rows of the embedding.
        element_bytes: Of an element of forward and backward.
        kv: Where keys and values of the layer being run are.
        save_attention: What is kept beside the inputs.
        read_slots: Copies of each tensor that comes from the tier: 2 where the next one comes while one is used.
        overlap: Whether heads travel between ranks while neighbouring chunks compute.
    """

    tokens: int
    ranks: int
    chunk_tokens: int
    ffn_chunk_tokens: int
    loss_chunk_tokens: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    element_bytes: int
    kv: Literal["device", "offload"] = "device"
    save_attention: Literal["none", "context", "all"] = "context"
    read_slots: int = 2
    overlap: bool = True

    @property
    def sum_bytes(self) -> int:
        """w: of an element of a sum."""
        return max(self.element_bytes, 4)

    @property
    def chunk_here(self) -> int:
        """c: tokens of a chunk on one rank."""
        return min(self.chunk_tokens, self.tokens) // self.ranks

    @property
    def ffn_range(self) -> int:
        """Tokens of a range of the feed-forward part, on one rank."""
        return min(self.ffn_chunk_tokens // self.ranks, self.chunk_here)

    @property
    def loss_range(self) -> int:
        """Tokens of a range of the loss, on one rank."""
        return min(self.loss_chunk_tokens // self.ranks, self.chunk_here)

    @property
    def heads_here(self) -> int:
        """Query heads of one rank after the exchange."""
        return -(-self.heads // self.ranks)

    @property
    def groups_here(self) -> int:
        """Key-value heads of one rank after the exchange."""
        return -(-self.groups // self.ranks)

    @property
    def pre_weights(self) -> int:
        """Numbers in norm and q, k, v projections: `h + h d (H + 2G)`."""
        return self.hidden + self.hidden * self.head_dim * (self.heads + 2 * self.groups)

    @property
    def post_weights(self) -> int:
        """Numbers in output projection, norm and feed-forward part: `h H d + h + 3 h f`."""
        return self.hidden * self.heads * self.head_dim + self.hidden + 3 * self.hidden * self.ffn

    @property
    def block_weights(self) -> int:
        """N: numbers in one block."""
        return self.pre_weights + self.post_weights

    @property
    def embedding_weights(self) -> int:
        """`V h`."""
        return self.vocab * self.hidden


def gathered_weights(s: StreamShape, blocks: int) -> int:
    """Weights of so many blocks and of what is in none, gathered: `e (blocks N + V h + h)`."""
    return s.element_bytes * (blocks * s.block_weights + s.embedding_weights + s.hidden)


def gathered_last(s: StreamShape) -> int:
    """What FSDP received the last block's weights in, which it keeps until backward begins: `e N`; none on one rank."""
    return 0 if s.ranks == 1 else s.element_bytes * s.block_weights


def integers(s: StreamShape) -> int:
    """Ids, labels and positions: `24 T/P`; lengths and a mask, which are made for the whole row: `9 (T + T/P)`."""
    here = s.tokens // s.ranks
    return 24 * here + 9 * (s.tokens + here)


def rotations(s: StreamShape) -> int:
    """Cosines and sines of some chunks: `c d w` each."""
    chunks = -(-s.tokens // s.chunk_tokens)
    return min(chunks, SHARED_ROTATIONS) * s.chunk_here * s.head_dim * s.sum_bytes


def hidden_slots(s: StreamShape) -> int:
    """A chunk of x and dy, with read slots, and of dx, with what waits to be written: `(2 r + 1 + (r - 1) 2) c h e`."""
    return (2 * s.read_slots + 1 + 2 * (s.read_slots - 1)) * s.chunk_here * s.hidden * s.element_bytes


def saved_slots(s: StreamShape) -> int:
    """A chunk of context and log-sum-exp as they come back: `r (c H d e + C H' w)`."""
    if s.save_attention == "none":
        return 0
    rows = s.chunk_here * s.ranks
    return s.read_slots * (s.chunk_here * s.heads * s.head_dim * s.element_bytes + rows * s.heads_here * s.sum_bytes)


def chunk_heads(s: StreamShape) -> int:
    """q, k, v before and, with more than one rank, after the exchange: `2 c (H + 2G) d e`."""
    copies = 1 if s.ranks == 1 else 2
    return copies * s.chunk_here * (s.heads + 2 * s.groups) * s.head_dim * s.element_bytes


def row_gradients(s: StreamShape) -> int:
    """dq, and what the kernel returns of one part before it is added: `C H' d (w + e) + 2 C G' d e`."""
    rows = s.chunk_here * s.ranks * s.head_dim
    of_keys = 2 * rows * s.groups_here * s.element_bytes
    return rows * s.heads_here * (s.sum_bytes + s.element_bytes) + of_keys


def head_gradients(s: StreamShape) -> int:
    """Of q, of q and k before rotation; normed inputs, two gradients of theirs: `c d (H w + (H + G) e) + 3 c h e`."""
    of_heads = s.heads * s.sum_bytes + (s.heads + s.groups) * s.element_bytes
    return s.chunk_here * (s.head_dim * of_heads + 3 * s.hidden * s.element_bytes)


def normed_inputs(s: StreamShape) -> int:
    """Kept for the gradients of the q, k, v projections: `c h e`."""
    return s.chunk_here * s.hidden * s.element_bytes


def context_gradient(s: StreamShape) -> int:
    """d_context: `c H d e`."""
    return s.chunk_here * s.heads * s.head_dim * s.element_bytes


def exchanged_outputs(s: StreamShape) -> int:
    """With more than one rank dout and out after the exchange: `2 C H' d e`."""
    rows = s.chunk_here * s.ranks
    return 0 if s.ranks == 1 else 2 * rows * s.heads_here * s.head_dim * s.element_bytes


def under_way(s: StreamShape) -> int:
    """Two more chunks, whose heads travel: one on its way to its row, the other one's gradients on their way home.

    Both keep x, dx, normed inputs, q, k, v: `2 c (3 h + (H + 2G) d) e`. Sent and received are q, context and d_context,
    or q alone: `2 c 3H d e`, `2 c H d e`; and dq, dk, dv: `2 c (H + 2G) d w`.
    """
    if s.ranks == 1 or not s.overlap:
        return 0
    of_heads = s.heads + 2 * s.groups
    kept = 2 * (3 * s.hidden + of_heads * s.head_dim) * s.element_bytes
    there = 2 * (1 if s.save_attention == "none" else 3) * s.heads * s.head_dim * s.element_bytes
    return s.chunk_here * (kept + there + 2 * of_heads * s.head_dim * s.sum_bytes)


def key_values(s: StreamShape) -> int:
    """K, V, dK, dV of one layer: `2 K G' d (e + w)` with K = T on the device, two chunks where they are offloaded."""
    tokens = min(2 * s.chunk_here * s.ranks, s.tokens) if s.kv == "offload" else s.tokens
    return 2 * tokens * s.groups_here * s.head_dim * (s.element_bytes + s.sum_bytes)


def ffn_activations(s: StreamShape) -> int:
    """Gate and up, their gradients, that of the product, and one product more: `6 n f e`; and `4 n h e`."""
    return s.ffn_range * (6 * s.ffn + 4 * s.hidden) * s.element_bytes


def weight_sums(s: StreamShape) -> int:
    """Of a block's gradients over chunks: `w N`."""
    return s.sum_bytes * s.block_weights


def weight_gradient(s: StreamShape) -> int:
    """One chunk's, of one weight, which is added before the next one is found; the largest of the MLP: `e h f`."""
    return s.element_bytes * s.hidden * s.ffn


def query_gradient(s: StreamShape) -> int:
    """Likewise, the largest before attention: `e h H d`."""
    return s.element_bytes * s.hidden * s.heads * s.head_dim


def finished_gradients(s: StreamShape, blocks: int) -> int:
    """This rank's share of the gradients of blocks whose backward is done: `w blocks N / P`."""
    return s.sum_bytes * blocks * s.block_weights // s.ranks


def reduction(s: StreamShape, weights: int, last: int) -> int:
    """Gradients in the order of their shards, a copy of that or the gradients themselves, and the share that is left.

    FSDP holds the gradient of the last weight a little longer: `w (n (2 + 1/P) + last)`; nothing on one rank.
    """
    return 0 if s.ranks == 1 else s.sum_bytes * (2 * weights + weights // s.ranks + last)


def reduced(s: StreamShape) -> int:
    """What the last reduction read, which FSDP keeps until the next one: `w N`; nothing on one rank."""
    return 0 if s.ranks == 1 else s.sum_bytes * s.block_weights


def head_gradient(s: StreamShape) -> int:
    """Of the head's weight, from the loss to the end of the step: `w V h`."""
    return s.sum_bytes * s.embedding_weights


def loss_range(s: StreamShape) -> int:
    """Logits, which become their own gradient: `w n V`; values, labelled rows, normed, gradients: `5 c h e`."""
    rows = s.chunk_here * s.hidden * s.element_bytes
    return s.sum_bytes * s.loss_range * s.vocab + 5 * rows


def moments(s: StreamShape, *, gathered: bool = True) -> dict[str, dict[str, int]]:
    """What is on the device, by moment of the step and name.

    Args:
        s: The run.
        gathered: Whether weights are gathered from shards, and not there anyway.
    """
    loss = _row(s) | _weights(s, s.layers, gathered) | {"head gradient": head_gradient(s)}
    done = _row(s) | {"finished": finished_gradients(s, s.layers)}
    embedding = done | _weights(s, 0, gathered) | {"head gradient": head_gradient(s), "reduced": reduced(s)}
    found = {
        "loss": loss | {"loss range": loss_range(s), "received": gathered_last(s) if gathered else 0},
        "head": loss | {"scaled": s.element_bytes * s.embedding_weights},
        "embedding": embedding | {"sums": s.sum_bytes * s.embedding_weights},
        # Gathered weights are given back before their gradients are reduced.
        "embedding's reduction": done | {"reduction": reduction(s, s.embedding_weights, s.hidden)},
    }
    for blocks in {s.layers, 1}:  # whose backward is still to come: all, or the first one alone
        found |= {f"{name} of block {blocks - 1}": terms for name, terms in _in_block(s, blocks, gathered).items()}
    return found


def _in_block(s: StreamShape, blocks: int, gathered: bool) -> dict[str, dict[str, int]]:
    """What is there in the backward of the last of so many blocks; those after it are done."""
    row = _row(s) | {"head gradient": head_gradient(s), "finished": finished_gradients(s, s.layers - blocks)}
    row["reduced"] = reduced(s) if blocks < s.layers else 0
    block = row | _weights(s, blocks, gathered) | {"saved": saved_slots(s), "weight sums": weight_sums(s)}
    block |= {"keys and values": key_values(s), "d_context": context_gradient(s), "under way": under_way(s)}
    attention = block | {"heads": chunk_heads(s), "context": exchanged_outputs(s)}
    post = attention if s.save_attention == "none" else block
    of_block = reduction(s, s.block_weights, s.hidden * s.ffn)
    return {
        "feed-forward": post | {"activations": ffn_activations(s), "chunk": weight_gradient(s)},
        "attention": attention | {"row": row_gradients(s), "normed": normed_inputs(s)},
        "projections": attention | {"gradients": head_gradients(s), "chunk": query_gradient(s)},
        "reduction": row | _weights(s, blocks - 1, gathered) | {"reduction": of_block},
    }


def _row(s: StreamShape) -> dict[str, int]:
    return {"integers": integers(s), "rotations": rotations(s), "hidden": hidden_slots(s)}


def _weights(s: StreamShape, blocks: int, gathered: bool) -> dict[str, int]:
    return {"weights": gathered_weights(s, blocks) if gathered else 0}


def device_bytes(s: StreamShape, *, gathered: bool = True) -> int:
    """Most bytes on the device at one time; arguments as in `moments`."""
    return max(sum(terms.values()) for terms in moments(s, gathered=gathered).values())


def tier_bytes(s: StreamShape) -> int:
    """On host or disk: inputs and a gradient `(L + 2) t h e`; `L (t H d e + T H' w)`; K, V, sums `2 T G' d (e + w)`."""
    here, whole = s.tokens // s.ranks, s.tokens
    total = (s.layers + 2) * here * s.hidden * s.element_bytes
    if s.save_attention != "none":
        total += s.layers * (here * s.heads * s.head_dim * s.element_bytes + whole * s.heads_here * s.sum_bytes)
    of_keys = 2 * whole * s.groups_here * s.head_dim
    if s.kv == "offload":
        total += of_keys * (s.element_bytes + s.sum_bytes)
    if s.save_attention == "all":
        total += s.layers * of_keys * s.element_bytes
    return total
