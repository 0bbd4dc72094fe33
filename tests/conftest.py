"""What every test shares: one thread, no network, no GPU where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")

import pytest
import torch
from hypothesis import settings
from torch.distributed.device_mesh import DeviceMesh

from freight.parallel.mesh import build_mesh
from freight.train.launch import launched
from freight.verify.ranks import RankPool

# Examples must not fail for being slow on a busy machine; what a test may take is bounded by its timeout.
settings.register_profile("freight", deadline=None, derandomize=True)
settings.load_profile("freight")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    not_asked = pytest.mark.skip(reason="slow: ask with -m slow")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "slow" in item.keywords and "slow" not in config.getoption("-m"):
            item.add_marker(not_asked)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks that live as long as the session."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def mesh() -> Iterator[DeviceMesh]:
    """The mesh of a world of one, in this process."""
    with launched() as world:
        yield build_mesh(world.size)
