"""Building: weights converted once, the same start on any number of ranks, and the same training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from freight.assemble.build import (
    architecture_for,
    build_for_inference,
    build_model,
    compile_blocks,
    model_tensors,
)
from freight.config.schema import Config, OptimizerConfig
from freight.errors import ConfigError
from freight.nn.decoder import Decoder
from freight.nn.loss_head import LogitsHead
from freight.ops.batch import TokenBatch
from freight.parallel.data import whole
from freight.parallel.mesh import build_mesh
from freight.train.optimizer import build_optimizer
from freight.train.step import StepResult, train_step
from freight.verify.ranks import RankPool
from freight.verify.tolerances import difference
from tests.train.tiny_run import MODEL, config

DOCUMENTS = ([1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14], [15, 16])
UNEVEN = MODEL | {"hidden_size": 36, "num_attention_heads": 3, "num_query_groups": 1, "head_dim": 12, "vocab_size": 65}


class Stored:
    """Weights by name, in bfloat16."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        self.read: list[str] = []

    def load(self, name: str) -> Tensor:
        self.read.append(name)
        return self.tensors[name]


def settings(**train: object) -> Config:
    base = {"epochs": None, "steps": 3, "global_batch_size": 2, "optimizer": {"lr": 1e-2}, "precision": "fp32"}
    return config(Path("unused"), model=UNEVEN, train=base | train)


def initial_tensors(world: int) -> dict[str, Tensor]:
    run = settings()
    return dict(model_tensors(build_model(architecture_for(run), run, build_mesh(world))))


def three_steps(world: int, precision: str) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Four documents a step, dealt to the ranks in turn, one a microbatch."""
    run, mesh = settings(precision=precision), build_mesh(world)
    model = build_model(architecture_for(run), run, mesh)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    mine = DOCUMENTS[mesh.get_rank() :: world]
    results = [
        train_step(
            model,
            optimizer,
            [TokenBatch.from_documents([ids], pad_to=8) for ids in mine],
            sum(len(ids) - 1 for ids in mine),
            learning_rate=1e-2,
            grad_clip=1.0,
            mesh=mesh,
            device=torch.device("cpu"),
        )
        for _ in range(3)
    ]
    return results, dict(model_tensors(model))


def test_any_number_of_ranks_starts_with_the_same_model(ranks: RankPool) -> None:
    (alone,) = ranks.run(initial_tensors, 1, 1)
    assert any(tensor.std() > 0.01 for tensor in alone.values())
    for together in ranks.run(initial_tensors, 2, 2):
        assert alone.keys() == together.keys()
        assert all(torch.equal(alone[name], together[name]) for name in alone)


def test_two_ranks_train_as_one(ranks: RankPool) -> None:
    ((alone, weights),) = ranks.run(three_steps, 1, 1, "fp32")
    for results, tensors in ranks.run(three_steps, 2, 2, "fp32"):
        assert [(r.loss, r.grad_norm) for r in results] == [
            pytest.approx((r.loss, r.grad_norm), rel=1e-5) for r in alone
        ]
        assert max(difference(tensors[name], weights[name]) for name in weights) < 1e-5


def test_weights_are_read_once_each_and_become_float32_masters(mesh: DeviceMesh) -> None:
    run = settings()
    arch = architecture_for(run)
    stored = Stored(dict(model_tensors(build_model(arch, run, mesh))))
    for precision in ("fp32", "bf16"):
        model = build_model(arch, settings(precision=precision), mesh, weights=stored)
        assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
        assert all(torch.equal(t, stored.tensors[n].float()) for n, t in model_tensors(model).items())
    assert sorted(stored.read) == sorted([*stored.tensors] * 2)


def test_inference_gives_the_logits_of_the_trained_model(mesh: DeviceMesh) -> None:
    run = settings()
    arch = architecture_for(run)
    model = build_model(arch, run, mesh)
    stored = Stored(dict(model_tensors(model)))
    batch = TokenBatch.from_documents(DOCUMENTS)
    trained = build_model(arch, run, mesh, weights=stored)
    plain = build_for_inference(arch, stored)
    assert not plain.training and not any(p.requires_grad for p in plain.parameters())
    with torch.no_grad():
        assert torch.equal(trained(batch, LogitsHead()), plain(batch, LogitsHead()))
    assert build_for_inference(arch, stored, dtype=torch.float64).norm.weight.dtype == torch.float64


def test_a_missing_architecture_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        architecture_for(Config.model_validate({**settings().model_dump(by_alias=True), "model": {"num_layers": 2}}))


def loss_and_gradients(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(TokenBatch.from_documents(DOCUMENTS))
    (out.objective / 12).backward()
    return out.nll, {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def test_blocks_are_traced_once_for_all_layers_and_agree(mesh: DeviceMesh) -> None:
    """Tracing and differentiation by the compiler, without its code generator, which takes a minute."""
    run = settings()
    arch = architecture_for(run).model_copy(update={"num_layers": 10})
    nll, gradients = loss_and_gradients(build_model(arch, run, mesh))
    model = build_model(arch, run, mesh)
    compile_blocks(model, backend="aot_eager")
    before = dict(counters["frames"])
    traced_nll, traced = loss_and_gradients(model)
    assert counters["frames"]["ok"] - before.get("ok", 0) == counters["frames"]["total"] - before.get("total", 0) <= 4
    assert difference(traced_nll, nll) < 1e-5
    assert traced.keys() == gradients.keys()
    assert all(difference(traced[name], gradients[name]) < 1e-5 for name in gradients)


@pytest.mark.slow
def test_compiled_blocks_agree(mesh: DeviceMesh) -> None:
    nll, gradients = loss_and_gradients(build_model(architecture_for(settings()), settings(), mesh))
    run = settings(compile=True)
    compiled_nll, compiled = loss_and_gradients(build_model(architecture_for(run), run, mesh))
    assert difference(compiled_nll, nll) < 1e-5
    assert all(difference(compiled[name], gradients[name]) < 1e-5 for name in gradients)
