"""What tests of runners share: batches, and the gradients that a runner gives."""

from __future__ import annotations

import torch
from torch import Tensor

from freight.memory.stores import Slab
from freight.nn.decoder import Decoder
from freight.ops.batch import TokenBatch
from freight.ops.protocols import BlockRunner, LossHead

ONE = (15,)
PACKED = (6, 3, 1, 4)
NAMES = ("input", "hidden", "context", "lse", "k", "v", "dk", "dv")
SLABS = {name: Slab(40, 1 << 13) for name in NAMES}


def batch_of(lengths: tuple[int, ...], pad_to: int | None = None, seed: int = 0, vocab: int = 31) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    return TokenBatch.from_documents(documents, pad_to=pad_to, seed=seed, step=5)


def gradients(
    model: Decoder, runner: BlockRunner, batch: TokenBatch, head: LossHead | None = None
) -> dict[str, Tensor]:
    """Loss and gradients; parameters without one are left out."""
    model.use_runner(runner)
    model.zero_grad()
    loss = model(batch, head).objective / 3
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | found


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        gap = (actual[name] - value).abs().max().item() / max(1.0, value.abs().max().item())
        assert gap <= tolerance, (name, gap)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def freeze_all_but(model: Decoder, *kept: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in kept))
