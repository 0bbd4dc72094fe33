"""Random weights depend on seed and name alone: not on device, dtype, layout or the model around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from freight.config.architecture import Architecture
from freight.nn import init
from freight.nn.decoder import Decoder
from freight.nn.init import init_weights
from freight.parallel.data import shard
from tests.nn.small_decoders import SMALL
from tests.oracles.decoder import naive_core


def make(device: str = "cpu", **changes: Any) -> Decoder:
    with torch.device(device):
        return Decoder(Architecture.model_validate(SMALL | changes), core=naive_core)


def test_meta_sharded_and_plain_models_start_alike(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BLOCK_NUMBERS", 64)  # several blocks per tensor, as large models have
    plain = make()
    init_weights(plain, 7)
    sharded = make("meta")
    shard(sharded, sharded.layers, mesh, "bf16")
    sharded.to_empty(device="cpu")
    init_weights(sharded, 7)
    expected = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), expected[name]), name


class Piece(torch.Tensor):
    """A matrix that claims to be some rows of a larger one, as a sharded tensor on another rank would."""

    offset = 0

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __create_chunk_list__(self) -> list[Any]:
        return [type("Chunk", (), {"offsets": (self.offset, 0)})()]


def test_a_rank_draws_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BLOCK_NUMBERS", 12)
    whole = torch.empty(11, 4)
    init.fill_drawn(whole, whole.shape, init.normal(1.0), 5, "w")
    for start, stop in [(0, 4), (4, 7), (7, 11), (11, 11)]:
        piece = torch.empty(stop - start, 4).as_subclass(Piece)
        piece.offset = start
        init.fill_drawn(piece, whole.shape, init.normal(1.0), 5, "w")
        assert torch.equal(piece.to_local(), whole[start:stop])


def test_columns_of_a_split_second_dim(mesh: DeviceMesh) -> None:
    whole = torch.empty(6, 4)
    init.fill_drawn(whole, whole.shape, init.normal(1.0), 5, "w")
    split = distribute_tensor(torch.empty(6, 4), mesh["dp_shard"], [Shard(1)])
    init.fill_drawn(split, whole.shape, init.normal(1.0), 5, "w")
    assert torch.equal(split.full_tensor(), whole)


def test_values_and_scales() -> None:
    model = make(hidden_size=64, ffn_hidden_size=256, init_std=0.02, num_layers=8, mlp_bias=True, vocab_size=500)
    init_weights(model, 0)
    weights = dict(model.named_parameters())
    expected = {"embed_tokens": 0.02, "layers.3.mlp.up_proj": 0.02, "layers.3.mlp.down_proj": 0.005}
    expected["layers.3.attention.o_proj"] = 0.005
    for name, std in expected.items():
        assert weights[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.05)
        assert abs(weights[f"{name}.weight"].mean().item()) < std * 0.05
    assert torch.equal(weights["layers.0.mlp.up_proj.bias"], torch.zeros(256))
    assert torch.equal(weights["norm.weight"], torch.ones(64))
    offset = make(norm_offset=True, norm="layernorm")
    init_weights(offset, 0)
    assert not offset.norm.weight.any() and not offset.norm.bias.any()  # type: ignore[union-attr]


def test_seed_and_name_decide() -> None:
    one, two, other = make(), make(num_layers=1).double(), make()
    init_weights(one, 0)
    init_weights(two, 0)
    init_weights(other, 1)
    state = global_state = torch.get_rng_state()
    assert torch.equal(one.embed_tokens.weight, two.embed_tokens.weight.float())
    assert not torch.equal(one.embed_tokens.weight, other.embed_tokens.weight)
    first, second = one.blocks
    assert not torch.equal(first.mlp.up_proj.weight, second.mlp.up_proj.weight)
    init_weights(one, 2)
    assert torch.equal(global_state, torch.get_rng_state()) and state is global_state
