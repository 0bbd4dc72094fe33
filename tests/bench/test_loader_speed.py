import time

import pytest

from freight.bench.loader_speed import copied, loader_throughput, synthetic_rows, waiting
from freight.data.load.loader import StepLoader


def test_both_sides_make_the_same_tensors():
    rows = synthetic_rows(50, 20, 64, 0)
    (step,) = StepLoader(rows, rows_per_step=2, micro_batch_tokens=64, steps=1)
    for batch in step.microbatches:
        assert [tensor.tolist() for tensor in copied(batch)] == [
            tensor.tolist() for tensor in (batch.input_ids, batch.labels, batch.position_ids)
        ]


def test_numbers_are_of_one_measurement():
    found = loader_throughput(documents=100, mean_tokens=20, pack_size=64, steps=4, repeats=3, step_seconds=0.001)
    assert found["tokens_per_step"] == 8 * 64
    assert found["loader_vs_copy"] > 0
    assert found["build_ms_per_step"] == pytest.approx(1e3 * 8 * 64 / found["loader_tokens_per_second"])
    assert 0 <= found["waiting_ms_per_step"] <= found["worst_waiting_ms"]


def test_a_slow_loader_shows():
    def slow():
        for _ in range(8):
            time.sleep(0.004)
            yield None

    assert min(waiting(slow(), 0.0)) >= 0.004
