import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.data.order import Permutation

KEYS = st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 9), st.text(max_size=5))


@settings(max_examples=30)
@given(st.integers(0, 10_000), KEYS)
def test_is_a_bijection_with_its_inverse(n, key):
    permutation = Permutation(n, key)
    elements = permutation.array()
    assert sorted(elements.tolist()) == list(range(n))
    assert elements[permutation.places()].tolist() == list(range(n))


@settings(max_examples=30)
@given(st.integers(1, 3000), KEYS, st.data())
def test_one_place_equals_the_array(n, key, data):
    place = data.draw(st.integers(0, n - 1))
    assert Permutation(n, key)[place] == Permutation(n, key).array()[place]


def test_the_same_seed_means_the_same_order_forever():
    assert Permutation(10, (0, 0)).array().tolist() == FIXED_TEN
    assert Permutation(1_000_003, (7, 3, "fingerprint")).at(np.array([0, 1, 1_000_002])).tolist() == FIXED_MILLION


FIXED_TEN = [1, 9, 3, 5, 6, 8, 7, 4, 0, 2]
FIXED_MILLION = [52284, 724790, 747554]


def test_keys_do_not_run_together():
    orders = {
        tuple(Permutation(50, key).array().tolist())
        for key in [(0, 0), (0, 1), (1, 0), (10,), (1, 0, 0), ("1", 0), (-1, 0), (2**64, 0)]
    }
    assert len(orders) == 8


@pytest.mark.parametrize(("n", "orders"), [(3, 6), (4, 24)])
def test_every_order_of_a_few_comes_equally_often(n, orders):
    counts = Counter(tuple(Permutation(n, (seed,)).array().tolist()) for seed in range(20 * orders))
    chi_square = sum((count - 20) ** 2 / 20 for count in counts.values())
    assert len(counts) == orders
    assert chi_square < orders + 5 * (2 * orders) ** 0.5


def test_neighbours_are_torn_apart():
    order = Permutation(4096, (1, 0)).array()
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.08
    assert abs(np.corrcoef(np.arange(4096), order)[0, 1]) < 0.08


def test_no_global_generator_is_touched():
    before = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()
    Permutation(1000, (3,)).array()
    assert before == (np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist())


def test_places_outside_are_refused():
    with pytest.raises(IndexError, match="place 5 of a permutation of 5"):
        Permutation(5, (0,))[5]
