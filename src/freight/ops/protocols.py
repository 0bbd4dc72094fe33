"""Where parallelism and memory schedules plug into the model.

`nn` calls these with a local default; `assemble` installs another implementation. Rooms on one floor meet here and
never import each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from freight.ops.batch import TokenBatch, TokenRange


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer asks of attention, beyond q, k, v and the batch.

    Args:
        scale: Factor on scores.
        window: Keys a token sees, itself included; None = all.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        dropout: Share of probabilities dropped; 0 outside training.
        causal: False lets every token of a document see all of it.
        layer: Global index of the layer, part of the dropout counter.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    causal: bool = True
    layer: int = 0


class AttentionCore(Protocol):
    """The only place where tokens meet."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch, spec: AttentionSpec) -> Tensor:
        """`q [tokens, heads, head_dim]`, `k, v [tokens, groups, head_dim]` -> context `[tokens, heads, head_dim]`."""
        ...


class RunnableBlock(Protocol):
    """What a runner may call of a block; it knows nothing else about the inside."""

    @property
    def attention_spec(self) -> AttentionSpec:
        """What `core` asks of attention now: without dropout outside training."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of `pre` and `post`, as they are used now."""
        ...

    def pre(self, hidden: Tensor, tokens: TokenRange) -> tuple[Tensor, Tensor, Tensor]:
        """`[tokens, hidden]` -> q, k, v; token-wise."""
        ...

    def keys(self, hidden: Tensor, tokens: TokenRange) -> tuple[Tensor, Tensor]:
        """Keys and values as `pre` makes them, without queries."""
        ...

    def core(self, q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch) -> Tensor:
        """Attention."""
        ...

    def post(self, hidden: Tensor, context: Tensor, tokens: TokenRange) -> Tensor:
        """`[tokens, hidden]`, `[tokens, heads, head_dim]` -> `[tokens, hidden]`; token-wise."""
        ...


class BlockRunner(Protocol):
    """How a block is executed: plainly, recomputed, or streamed chunk by chunk."""

    def run(self, block: RunnableBlock, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, hidden]`."""
        ...

    def run_part(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """A named part of a block (`norm`, `activation`, `mlp`, ...); by default just the call."""
        ...


class LossSums(NamedTuple):
    """Sums over the label tokens of a microbatch; the caller divides once by the global count.

    Args:
        objective: Scalar with a graph: what is minimised (label smoothing and z-loss included).
        nll: Scalar without a graph: plain negative log-likelihood.
    """

    objective: Tensor
    nll: Tensor


class LossHead(Protocol):
    """From the last hidden states to whatever the caller wants of the logits."""

    def __call__(self, hidden: Tensor, norm: nn.Module, weight: Tensor, batch: TokenBatch) -> Any:
        """`hidden [tokens, hidden]` before the final norm, `weight [vocab, hidden]`; token by token."""
        ...


class TokenDispatcher(Protocol):
    """Moves tokens to their experts and back."""

    def dispatch(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Any:
        """`tokens [tokens, hidden]`, `experts [tokens, top_k]` -> rows grouped by expert."""
        ...

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Expert outputs -> `[tokens, hidden]` in the original order."""
        ...


class Pending(Protocol):
    """Tensors that are on their way."""

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, once they are there; called once."""
        ...


class HeadTransport(Protocol):
    """Exchanges a token shard of all heads for all tokens of a head shard.

    Tensors are raw (no graph); all of one call travel in one collective, and every rank calls in the same order. `kv`
    says how many of the last tensors have key-value heads (K, V or their gradients); a rank may hold as many of these
    as of query heads, so it cannot be told from shapes.

    Args:
        size: Ranks that share the tokens; a rank's `[tokens / size, ...]` of a chunk become `[tokens, ...]`.
        first_head: Global number of this rank's first query head, part of the dropout counter.
    """

    size: int
    first_head: int

    def pieces(self, chunk: tuple[int, int]) -> Sequence[tuple[int, int]]:
        """Which tokens of a chunk `[start, stop)` scattered query heads are of, in order; K and V are of all."""
        ...

    def scatter_heads(self, *tensors: Tensor, kv: int = 0) -> tuple[Tensor, ...]:
        """`[tokens / size, heads, d]` -> `[tokens, heads of this rank, d]` in order; query heads only of `pieces`."""
        ...

    def gather_heads(self, *tensors: Tensor, kv: int = 0) -> tuple[Tensor, ...]:
        """`[tokens, heads of this rank, d]` -> `[tokens / size, heads, d]`; key-value heads held twice are summed."""
        ...

    def start_scatter_heads(self, *tensors: Tensor, kv: int = 0) -> Pending:
        """`scatter_heads`, under way while the caller computes."""
        ...

    def start_gather_heads(self, *tensors: Tensor, kv: int = 0) -> Pending:
        """`gather_heads`, under way while the caller computes."""
        ...


class Key(NamedTuple):
    """What a store knows a tensor by.

    Args:
        name: Kind of tensor; the kinds of a store have slots of their own size.
        owner: Whose it is: a number that no two (layer, microbatch) in flight share.
        chunk: Number of the chunk.
    """

    name: str
    owner: int
    chunk: int = 0


class RowStore(Protocol):
    """Lends tensors whose memory is a tier's, and moves rows of them to the device and back.

    A lent tensor is an ordinary one: graphs and hooks hold it, and its memory returns to the tier when nothing does.
    But its values travel: only `read` knows when they are there. On a CPU `settle` makes them readable for everyone;
    for computation on CUDA lent tensors are on another device, and an op that does not know of tiers refuses them.
    """

    def lend(self, name: str, like: Tensor, rows: int) -> Tensor:
        """`[rows, ...]` of the kind `name`, else like `like`; values are yet to be written."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor, or one it is a view of, was lent."""
        ...

    def write(self, place: Tensor, value: Tensor) -> None:
        """Bring values to some rows; they belong to the store, the caller writes to them no more."""
        ...

    def fetch(self, place: Tensor) -> None:
        """Begin to bring some rows of a lent tensor to the device, for the next `read`."""
        ...

    def settle(self) -> None:
        """Have what was written be there for readers that do not use `read`; waits for no other device."""
        ...

    def read(self, place: Tensor) -> Tensor:
        """Values of some rows, on the device; of a tensor that was not lent, the rows themselves."""
        ...


class TensorStore(RowStore, Protocol):
    """Keeps tensors on a tier (device, host, disk) and gives them back, bit for bit.

    A tensor that was put belongs to the store: the caller writes to it no more. A tensor that was gotten is read only.
    Nothing waits for a device; a call waits for a transfer only where what it needs is still on its way.

    Args:
        on_device: The tier is the device itself: what is there already need not be put.
        bytes_in: Bytes brought to the device so far.
        bytes_out: Bytes taken from it.
    """

    on_device: bool
    bytes_in: int
    bytes_out: int

    @property
    def wait_seconds(self) -> float:
        """Time that callers spent waiting for transfers."""
        ...

    def put(self, key: Key, tensor: Tensor) -> None:
        """Take a tensor, or put another in its place."""
        ...

    def prefetch(self, key: Key) -> None:
        """Begin to bring a tensor to the device, for the next `get`."""
        ...

    def get(self, key: Key) -> Tensor:
        """The tensor, on the device; the store keeps it."""
        ...

    def accumulate(self, key: Key, tensor: Tensor) -> None:
        """Add to what is kept, or put a float32 (float64 for float64) copy if nothing is."""
        ...

    def free(self, key: Key) -> None:
        """Forget a tensor; nothing if it is not there."""
        ...

    def close(self) -> None:
        """Give everything back; the store cannot be used any more."""
        ...
