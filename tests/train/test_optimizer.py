"""Decay groups, and state that exists from the start."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from freight.assemble.build import architecture_for, build_model
from freight.config.schema import OptimizerConfig
from freight.train.optimizer import build_optimizer, decay_groups, optimizer_state
from tests.train.tiny_run import MODEL, config


def model(mesh: DeviceMesh, tmp_path, **keys: object):
    settings = config(tmp_path, model=MODEL | keys)
    return build_model(architecture_for(settings), settings, mesh)


def test_matrices_decay_and_norms_and_biases_do_not(mesh: DeviceMesh, tmp_path) -> None:
    decaying, others = decay_groups(model(mesh, tmp_path, attention_bias=True, norm="layernorm", qk_norm="head"))
    assert {name.split(".")[-2] for name in decaying} == {
        "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert all(name.endswith("bias") or "norm" in name for name in others)
    assert any("q_norm" in name for name in others)


def test_every_trainable_parameter_has_float32_state_and_frozen_ones_have_none(mesh: DeviceMesh, tmp_path) -> None:
    decoder = model(mesh, tmp_path)
    frozen = dict(decoder.named_parameters())["embed_tokens.weight"]
    frozen.requires_grad_(False)
    optimizer = build_optimizer(decoder, OptimizerConfig(lr=0.1, weight_decay=0.3))
    state = optimizer_state(decoder, optimizer)
    assert state.keys() == {name for name, p in decoder.named_parameters() if p is not frozen}
    for values in state.values():
        assert isinstance(values["exp_avg"], DTensor)
        assert {value.dtype for value in values.values()} == {torch.float32}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.defaults["fused"]


def test_state_made_beforehand_changes_no_update(mesh: DeviceMesh, tmp_path) -> None:
    torch.manual_seed(0)
    one, other = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
    other.load_state_dict(one.state_dict())
    ours = build_optimizer(one, OptimizerConfig(lr=0.1, weight_decay=0.0))
    theirs = torch.optim.AdamW(other.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(3):
        for layer, optimizer in ((one, ours), (other, theirs)):
            layer(torch.ones(5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(one.weight, other.weight)
