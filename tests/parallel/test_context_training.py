"""Loss, every gradient, the norm and three steps are those of one process, however ranks share the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from freight.verify.ranks import RankPool
from freight.verify.tolerances import close
from tests.nn.small_decoders import VARIANTS, build
from tests.parallel.training_tasks import Steps, Training, three_steps, train

METHODS = ["ring", "all_gather", "ulysses"]


def runs_of(method: str) -> list[Training]:
    """GQA with full attention; a window in every other layer, MQA, softcaps, one label only; MHA, untied."""
    return [
        Training(method, VARIANTS["llama"]),
        Training(method, VARIANTS["gemma2"] | dict(num_query_groups=1), sparse=True),
        Training(method, VARIANTS["untied"] | dict(num_query_groups=4)),
    ]


def in_one_process(run: Training, mesh: DeviceMesh) -> Steps:
    """Without FSDP, without layouts."""
    return three_steps(build(**run.model)[0], run.microbatches(), mesh)


@pytest.mark.parametrize(
    ("data", "context", "methods"),
    [
        (1, 1, ["none"]),
        (2, 1, ["none"]),
        (1, 2, METHODS),
        (2, 2, METHODS),
        (1, 4, [*METHODS, "hybrid", "ring contiguous"]),
        (1, 1, ["streamed 1"]),
        (1, 2, ["streamed 1", "streamed 2"]),
        (1, 4, ["streamed 1", "streamed 2", "streamed 4"]),
    ],
    ids=lambda x: x[0].split()[0] if isinstance(x, list) else str(x),
)
def test_three_steps_equal_one_process(
    ranks: RankPool, mesh: DeviceMesh, data: int, context: int, methods: list[str]
) -> None:
    runs = [run for method in methods for run in runs_of(method)]
    expected = [in_one_process(run, mesh) for run in runs_of("none")] * len(methods)
    for of_rank in ranks.run(train, data * context, data, context, runs):
        for run, steps, wanted in zip(runs, of_rank, expected, strict=True):
            assert steps.losses == pytest.approx(wanted.losses, abs=1e-11), run
            assert steps.norms == pytest.approx(wanted.norms, abs=1e-11), run
            assert steps.gradients.keys() == wanted.gradients.keys()
            for name, gradient in wanted.gradients.items():
                assert gradient.abs().max() > 0 and close(steps.gradients[name], gradient), f"{name} of {run}"
            for name, parameter in wanted.parameters.items():
                assert close(steps.parameters[name], parameter), f"{name} of {run}"


def test_float32_gradients_are_summed_too(ranks: RankPool, mesh: DeviceMesh) -> None:
    """Sums are asked for in another way than in float64."""
    run = Training("ring", VARIANTS["llama"])
    wanted = in_one_process(run, mesh)
    for (steps,) in ranks.run(train, 2, 1, 2, [replace(run, precision="fp32")]):
        assert steps.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert steps.norms == pytest.approx(wanted.norms, rel=1e-4)
        for name, gradient in wanted.gradients.items():
            assert steps.gradients[name].dtype == torch.float32 and close(steps.gradients[name], gradient), name
