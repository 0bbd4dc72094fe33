"""Random weights that depend on (seed, parameter name) alone.

Every tensor is drawn in blocks of rows, each from its own generator, on the CPU and in float32. So any rank draws just
the blocks that its shard touches, and any layout, device or dtype starts as the same model. The price is drawing on the
CPU: about 100 million numbers per second and rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from freight.nn.decoder import Decoder
from freight.nn.norm import LayerNorm, RMSNorm

BLOCK_NUMBERS = 1 << 20
Draw = Callable[[Tensor, torch.Generator], Tensor]


@torch.no_grad()
def init_weights(model: Decoder, seed: int) -> None:
    """Fill every parameter, in place.

    Weights are normal(0, `init_std`), those of `o_proj` and `down_proj` divided by `sqrt(2 num_layers)` so that the sum
    of all branches keeps its size; biases 0; norms 1 (0 where the norm multiplies by `1 + weight`).

    Args:
        model: On a real device; parameters may be sharded.
        seed: Of the whole model.
    """
    std = model.arch.init_std
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                parameter.fill_(0)
            elif isinstance(module, RMSNorm | LayerNorm):
                parameter.fill_(0 if module.offset else 1)
            else:
                branch = module_name.endswith(("o_proj", "down_proj"))
                scaled = std / math.sqrt(2 * model.arch.num_layers) if branch else std
                fill_drawn(parameter, parameter.shape, normal(scaled), seed, f"{module_name}.{name}")


def normal(std: float) -> Draw:
    """Draws from a normal distribution around 0."""
    return lambda values, generator: values.normal_(0, std, generator=generator)


def uniform(bound: float) -> Draw:
    """Draws evenly between `-bound` and `bound`."""
    return lambda values, generator: values.uniform_(-bound, bound, generator=generator)


def fill_drawn(parameter: Tensor, shape: Sequence[int], draw: Draw, seed: int, name: str) -> None:
    """Draw the rows of a matrix of which `parameter` holds a part or all.

    Args:
        parameter: Plain or sharded.
        shape: Of the whole matrix: `[rows, columns]`.
        draw: Fills a float32 tensor from a generator.
        seed: Of the whole model.
        name: Tells this matrix from every other.
    """
    rows, columns = shape
    block_rows = max(1, BLOCK_NUMBERS // columns)
    for target, (row, column) in _local_pieces(parameter):
        stop = row + target.shape[0]
        for block in range(row // block_rows, -(-stop // block_rows)):
            first = block * block_rows
            values = torch.empty(min(block_rows, rows - first), columns)
            draw(values, _generator(seed, name, block))
            low, high = max(row, first), min(stop, first + values.shape[0])
            part = values[low - first : high - first, column : column + target.shape[1]]
            target[low - row : high - row] = part.to(target.device, target.dtype)


def _local_pieces(parameter: Tensor) -> list[tuple[Tensor, tuple[int, int]]]:
    """Pieces of a matrix that this process holds, with their offsets; a sharded tensor says so itself."""
    if not hasattr(parameter, "__create_chunk_list__"):
        return [(parameter, (0, 0))]
    local = parameter.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    chunks = parameter.__create_chunk_list__()  # pyright: ignore[reportAttributeAccessIssue]
    return [(local, tuple(chunk.offsets)) for chunk in chunks if local.numel()]


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
