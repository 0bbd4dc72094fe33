"""From a process to a rank."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from freight.errors import ConfigError
from freight.train.launch import environment, launched, world_from


def test_without_variables_the_process_is_a_world_of_one() -> None:
    world = world_from({})
    assert (world.rank, world.size) == (0, 1)
    assert world.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert world_from({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).size == 1


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2", "RANK": "2"}, "`RANK` 2 must be below `WORLD_SIZE` 2"),
        ({"RANK": "first"}, "`RANK` must be a number; got 'first'"),
        ({"LOCAL_RANK": "-1"}, "`LOCAL_RANK` must be a number; got '-1'"),
    ],
)
def test_what_cannot_run_is_refused_before_any_group_exists(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        world_from(variables)


def test_a_group_exists_while_launched_and_an_existing_one_is_kept() -> None:
    before = dist.is_initialized()
    with launched(), launched() as world:
        assert dist.get_world_size() == world.size == 1
    assert dist.is_initialized() == before


def test_environment_is_json_and_names_what_a_bug_report_needs() -> None:
    facts = json.loads(json.dumps(environment()))
    assert facts["packages"]["torch"] == torch.__version__.split("+")[0] or torch.__version__.startswith(
        facts["packages"]["torch"]
    )
    assert facts["cpu"]["threads"] >= 1
    assert facts["memory_bytes"] > 0
