from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.data.documents import InMemoryDocuments, make_document
from freight.data.load.loader import StepLoader
from freight.data.pack.document_order import MixedSources, documents_per_source
from freight.data.pack.document_rows import DocumentRows
from freight.data.pack.mixture import LARGEST_PERIOD, Mixture
from freight.errors import DataError


def slowly(units, count):
    """The rule as it is stated, in exact integers."""
    taken, out = [0] * len(units), []
    for k in range(1, count + 1):
        owed = [unit * k - sum(units) * t for unit, t in zip(units, taken, strict=True)]
        out.append(owed.index(max(owed)))
        taken[out[-1]] += 1
    return out


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 300))
def test_any_sample_follows_the_rule(units, count):
    mixture = Mixture([unit / 8 for unit in units])
    sources, numbers = mixture.at(np.arange(count))
    assert sources.tolist() == slowly(units, count)
    seen = [0] * len(units)
    for source, number in zip(sources, numbers, strict=True):
        assert number == seen[source]
        seen[source] += 1
    assert mixture.taken(count).tolist() == seen
    assert max(abs(seen - mixture.shares * count)) < len(units)


def test_shares_by_hand():
    # owed after each sample of 0.5, 0.3, 0.2: the largest first, ties to the first source
    assert Mixture([0.5, 0.3, 0.2]).at(np.arange(10))[0].tolist() == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0]
    assert Mixture([1, 1]).at(np.arange(4))[0].tolist() == [0, 1, 0, 1]
    assert Mixture([3]).at(np.array([7, 10**12]))[1].tolist() == [7, 10**12]


def test_far_samples_cost_nothing_and_keep_the_shares():
    mixture = Mixture([0.7, 0.2999, 0.0001])
    assert mixture.period == 10_000
    assert mixture.taken(10**15).tolist() == [7 * 10**14, 2999 * 10**11, 10**11]
    source, number = mixture.at(np.array([10**15]))
    assert number[0] == mixture.taken(10**15)[source[0]]


def test_odd_weights_are_rounded_and_tiny_ones_refused():
    mixture = Mixture([0.123456789, 0.3, 1.1])
    assert abs(mixture.period - LARGEST_PERIOD) <= 1
    assert mixture.shares == pytest.approx(np.array([0.123456789, 0.3, 1.1]) / 1.523456789, abs=1e-5)
    with pytest.raises(DataError, match=r"weight 1e-09 is less than 1/131,072 of all weights"):
        Mixture([1, 1e-9])


def order_of(counts, weights, key=(0, "f")):
    return MixedSources(counts, Mixture(weights), key)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_every_round_of_a_source_has_each_of_its_documents_once(sources, shuffle, data):
    counts, weights = zip(*sources, strict=True)
    order, total = order_of(counts, weights, (3, "f") if shuffle else None), sum(counts)
    epochs = 4
    stream = np.concatenate([order.at(epoch, np.arange(total)) for epoch in range(epochs)])
    starts = np.cumsum([0, *counts])
    for source, count in enumerate(counts):
        mine = stream[(stream >= starts[source]) & (stream < starts[source + 1])] - starts[source]
        for first in range(0, len(mine) - count + 1, count):
            assert sorted(mine[first : first + count].tolist()) == list(range(count))
    places = np.array(data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=5).map(sorted)))
    assert order.at(2, places).tolist() == stream[2 * total + places].tolist(), "any place alone"


def test_rounds_and_sources_are_shuffled_apart():
    stream = order_of([50, 50], [1, 1]).at(0, np.arange(100))
    assert (stream[::2] != stream[1::2] - 50).any()
    again = order_of([50, 50], [1, 1]).at(1, np.arange(100))
    assert stream.tolist() != again.tolist()
    assert order_of([50, 50], [1, 1], None).at(0, np.arange(4)).tolist() == [0, 50, 1, 51]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_sources_are_counted(counts):
    names = [f"s{n}" for n in range(len(counts))]
    spread = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    documents = InMemoryDocuments([make_document([1], [True])] * len(spread), sources=spread)
    assert documents_per_source(documents, names) == counts


def mixed_rows(counts, weights, **options):
    spread = [f"s{n}" for n, count in enumerate(counts) for _ in range(count)]
    made = [make_document([i + 1] * (1 + i % 7), [True] * (1 + i % 7)) for i in range(len(spread))]
    named = {f"s{n}": weight for n, weight in enumerate(weights)}
    return DocumentRows(InMemoryDocuments(made, sources=spread), "first_fit_shuffle", 8, weights=named, **options)


def documents_of(step):
    return [d for batch in step.microbatches for d in batch.documents if d >= 0]


@pytest.mark.parametrize("window", [None, 5])
def test_rows_have_what_the_mixture_takes(window):
    rows = mixed_rows([3, 9], [3, 1], window_documents=window)
    loader = StepLoader(rows, rows_per_step=3, micro_batch_tokens=8, epochs=4)
    stream = [document for step in loader for document in documents_of(step)]
    assert len(stream) == 4 * 12
    assert sum(document < 3 for document in stream) == 36, "3 of 4, that is 12 passes over the small source"
    large = Counter(document for document in stream if document >= 3)
    assert sorted(large) == list(range(3, 12)) and sorted(large.values()) == [1] * 6 + [2] * 3
    assert rows.num_tokens == sum(
        int(rows.row(0, w, n).num_tokens) for w in range(3) for n in range(rows.rows_in(0, w))
    )
    assert [share._asdict() for share in rows.mixture] == [
        {"name": "s0", "documents": 3, "share": 0.75, "taken": 9},
        {"name": "s1", "documents": 9, "share": 0.25, "taken": 3},
    ]
    assert str(rows.mixture[0]) == "s0 75.00%, 9 of its 3 documents (3.00 passes)"


@settings(max_examples=20)
@given(st.data())
def test_a_mixture_resumes_anywhere_on_any_ranks(data):
    counts = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3))
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(counts), max_size=len(counts)))
    window = data.draw(st.sampled_from([None, 4]))

    def loaders(ranks, state=None):
        made = [
            StepLoader(
                mixed_rows(counts, weights, window_documents=window),
                rows_per_step=4, micro_batch_tokens=8, epochs=3, data_ranks=ranks, rank=rank,
                num_workers=data.draw(st.sampled_from([0, 1, 3])),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        for loader in made:
            if state:
                loader.load_state_dict(state)
        return made

    straight = [sorted(documents_of(step)) for step in loaders(1)[0]]
    stop = data.draw(st.integers(1, len(straight)))
    first = loaders(data.draw(st.sampled_from([1, 2, 4])))
    joined = [
        sorted(d for step in steps for d in documents_of(step)) for steps in islice(zip(*first, strict=True), stop)
    ]
    second = loaders(data.draw(st.sampled_from([1, 2, 4])), first[0].state_dict())
    joined += [sorted(d for step in steps for d in documents_of(step)) for steps in zip(*second, strict=True)]
    assert joined == straight


def test_other_weights_are_a_change_of_the_data():
    state = StepLoader(mixed_rows([3, 3], [1, 1]), rows_per_step=2, micro_batch_tokens=8, epochs=1).state_dict()
    other = StepLoader(mixed_rows([3, 3], [1, 2]), rows_per_step=2, micro_batch_tokens=8, epochs=1)
    with pytest.raises(DataError, match=r"packing weights \{'s0': 1, 's1': 1\} -> \{'s0': 1, 's1': 2\}"):
        other.load_state_dict(state)
    plain = StepLoader(mixed_rows([3, 3], []), rows_per_step=2, micro_batch_tokens=8, epochs=1)
    with pytest.raises(DataError, match=r"packing weights .* -> None"):
        plain.load_state_dict(state)
