"""One step against values known by hand: sums over the global batch, clipping, skipping, float32 masters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from freight.config.schema import OptimizerConfig
from freight.ops.batch import TokenBatch
from freight.ops.protocols import LossSums
from freight.parallel.data import shard
from freight.parallel.mesh import build_mesh
from freight.train.optimizer import build_optimizer
from freight.train.step import StepResult, train_step
from freight.verify.ranks import RankPool

CPU = torch.device("cpu")


class Line(nn.Module):
    """A token's loss is `w * id`, over tokens with a label; ids 98 and 99 stand for inf and nan."""

    def __init__(self, weight: Sequence[float] = (1.0, 1.0)) -> None:
        super().__init__()
        self.block = nn.Linear(1, len(weight), bias=False)
        self.block.weight.data = torch.tensor(weight)[:, None]
        self.seen_dtypes: list[torch.dtype] = []

    def forward(self, batch: TokenBatch) -> LossSums:
        weight = self.block(torch.ones(1, dtype=self.block.weight.dtype))
        self.seen_dtypes.append(weight.dtype)
        x = batch.input_ids.to(weight.dtype)
        x = torch.where(batch.input_ids == 98, torch.inf, torch.where(batch.input_ids == 99, torch.nan, x))
        losses = weight[0] * torch.where(batch.labels >= 0, x, 0)
        return LossSums(losses.sum(), losses.detach().sum())


def microbatch(ids: list[int], labelled: bool = True) -> TokenBatch:
    return TokenBatch.from_documents([ids], [[0 if labelled else -100] * len(ids)])


def step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: list[list[int]],
    mesh: DeviceMesh,
    *,
    lr: float = 0.0,
    grad_clip: float | None = None,
    targets: int | None = None,
) -> StepResult:
    count = sum(map(len, batches)) if targets is None else targets
    microbatches = [microbatch(ids, labelled=count > 0) for ids in batches]
    return train_step(
        model, optimizer, microbatches, count, learning_rate=lr, grad_clip=grad_clip, mesh=mesh, device=CPU
    )


def wrapped(mesh: DeviceMesh, precision: str = "fp32", weight: Sequence[float] = (1.0, 1.0)) -> Line:
    model = Line(weight)
    shard(model, iter([model.block]), mesh, precision)  # type: ignore[arg-type]
    return model


def full(tensor: Tensor) -> list[float]:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).flatten().tolist()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batches", [[[4], [1, 1, 1]], [[4, 1], [1, 1]], [[4, 1, 1, 1]], [[4], [1], [1], [1]]])
def test_loss_is_the_token_mean_of_the_global_batch(batches: list[list[int]], precision: str, mesh: DeviceMesh) -> None:
    model = wrapped(mesh, precision)
    result = step(model, SGD(model.parameters(), lr=1.0), batches, mesh, lr=1.0)
    assert (result.loss, result.grad_norm, result.num_targets) == (1.75, 1.75, sum(map(len, batches)))
    assert full(model.block.weight) == [-0.75, 1.0]
    assert model.block.weight.dtype == torch.float32
    assert set(model.seen_dtypes) == {torch.float32 if precision == "fp32" else torch.bfloat16}


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_accumulation_divides_once(rows: int, mesh: DeviceMesh) -> None:
    model = wrapped(mesh)
    batches = [[2] * (8 // rows)] * rows
    result = step(model, SGD(model.parameters()), batches, mesh)
    assert (result.loss, result.grad_norm) == (2.0, 2.0)


def test_a_short_last_window_needs_no_correction(mesh: DeviceMesh) -> None:
    model = wrapped(mesh)
    optimizer = SGD(model.parameters())
    windows = [[[3, 5]] * 2, [[3, 5]] * 2, [[3, 5]]]
    results = [step(model, optimizer, window, mesh) for window in windows]
    assert {(r.loss, r.grad_norm) for r in results} == {(4.0, 4.0)}
    assert all(p.grad is None for p in model.parameters())


def test_gradients_accumulate_in_float32_under_bf16_compute(mesh: DeviceMesh) -> None:
    """256 + 1 is 256 in bf16; forty ones after it would all be lost."""
    model = wrapped(mesh, "bf16", (0.0, 0.0))
    optimizer = SGD(model.parameters())
    step(model, optimizer, [[256], *[[1]] * 40], mesh, lr=1.0, targets=1)
    assert full(model.block.weight)[0] == -296.0


def data_parallel(precision: str, batches: list[list[list[int]]], targets: list[int]) -> tuple[StepResult, list[float]]:
    torch.manual_seed(0)
    mesh = build_mesh(2)
    rank = mesh.get_rank()
    model = wrapped(mesh, precision)
    optimizer = SGD(model.parameters(), lr=1.0)
    result = step(model, optimizer, batches[rank], mesh, lr=1.0, targets=targets[rank])
    return result, full(model.block.weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_counts_and_gradients_are_summed_over_data_ranks(precision: str, ranks: RankPool) -> None:
    for result, weight in ranks.run(data_parallel, 2, precision, [[[4]], [[1, 1, 1]]], [1, 3]):
        assert (result.loss, result.grad_norm, weight) == (1.75, 1.75, [-0.75, 1.0])


def test_a_rank_without_labels_changes_nothing(ranks: RankPool) -> None:
    for result, weight in ranks.run(data_parallel, 2, "fp32", [[[4]], [[1, 1, 1]]], [1, 0]):
        assert (result.loss, result.grad_norm, weight) == (4.0, 4.0, [-3.0, 1.0])


def nan_on_rank_one() -> tuple[StepResult, list[float]]:
    return data_parallel("fp32", [[[4]], [[99]]], [1, 1])


def test_nan_on_one_rank_stops_all(ranks: RankPool) -> None:
    for result, weight in ranks.run(nan_on_rank_one, 2):
        assert math.isnan(result.grad_norm)
        assert not result.updated
        assert weight == [1.0, 1.0]


def test_no_label_at_all_skips_the_update(mesh: DeviceMesh) -> None:
    model = wrapped(mesh)
    result = step(model, SGD(model.parameters()), [[4]], mesh, lr=1.0, targets=0)
    assert math.isnan(result.loss)
    assert not result.updated
    assert full(model.block.weight) == [1.0, 1.0]


def test_clipping_scales_the_whole_gradient_once(mesh: DeviceMesh) -> None:
    model = wrapped(mesh)
    result = step(model, SGD(model.parameters(), lr=1.0), [[4]], mesh, lr=1.0, grad_clip=1.0)
    assert result.grad_norm == 4.0
    assert full(model.block.weight)[0] == pytest.approx(0.0, abs=1e-6)
    model = wrapped(mesh)
    step(model, SGD(model.parameters(), lr=1.0), [[4]], mesh, lr=1.0, grad_clip=100.0)
    assert full(model.block.weight)[0] == -3.0


@pytest.mark.parametrize("bad", [98, 99])
def test_non_finite_gradients_leave_no_trace(bad: int, mesh: DeviceMesh) -> None:
    def run(batches: list[list[list[int]]]) -> tuple[list[StepResult], list[list[float]]]:
        model = wrapped(mesh)
        optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
        results = [step(model, optimizer, batch, mesh, lr=0.1) for batch in batches]
        assert all(p.grad is None for p in model.parameters())
        state = optimizer.state[model.block.weight]
        return results, [full(model.block.weight), *(full(state[k]) for k in ("exp_avg", "exp_avg_sq", "step"))]

    results, after = run([[[4]], [[bad], [1]], [[3]]])
    assert [result.updated for result in results] == [True, False, True]
    assert not math.isfinite(results[1].grad_norm)
    assert after == run([[[4]], [[3]]])[1]


def test_small_updates_do_not_vanish_under_bf16_compute(mesh: DeviceMesh) -> None:
    model = wrapped(mesh, "bf16")
    optimizer = SGD(model.parameters())
    for _ in range(100):
        step(model, optimizer, [[1]], mesh, lr=6e-4)
    weight = full(model.block.weight)[0]
    assert weight == pytest.approx(0.940002, abs=1e-6)
    assert torch.tensor(weight).to(torch.bfloat16).item() == 0.94140625
