"""The decoder under FSDP2 on a world of one: the path every training run takes."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from freight.config.architecture import Architecture
from freight.nn.decoder import Decoder
from freight.nn.init import init_weights
from freight.ops.batch import TokenBatch
from freight.parallel.data import shard
from tests.nn.small_decoders import SMALL
from tests.oracles.decoder import naive_core


def test_tied_decoder_learns_in_bfloat16_with_float32_masters(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = Decoder(Architecture.model_validate(SMALL | dict(num_query_groups=2, init_std=0.1)), core=naive_core)
    assert all(parameter.is_meta for parameter in model.parameters())
    shard(model, model.layers, mesh, "bf16")
    model.to_empty(device="cpu")
    init_weights(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(8):
        batch = TokenBatch.from_documents([[1, 2, 3, 4, 5], [9, 8, 7]], pad_to=10)
        sums = model(batch)
        (sums.objective / 6).backward()
        losses.append(sums.nll.item())
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            grad = parameter.grad.to_local()
            assert grad.dtype == torch.float32 and grad.isfinite().all() and grad.abs().max() > 0, name
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]
    assert isinstance(model, FSDPModule)
    assert "head.weight" not in dict(model.named_parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
