import numpy as np
import pytest

from freight.data.documents import Fingerprint, InMemoryDocuments, make_document
from freight.ops.batch import IGNORE_INDEX


def test_labels_are_the_next_targets_and_nothing_at_the_end():
    document = make_document([1, 2, 3, 4, 5], [True, False, True, False, True])
    assert document.labels().tolist() == [IGNORE_INDEX, 3, IGNORE_INDEX, 5, IGNORE_INDEX]
    assert document.num_targets == 2


def test_the_first_token_is_never_a_target():
    assert make_document([7, 8], [True, True]).loss_mask.tolist() == [False, True]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_pieces_keep_every_input_and_every_target_once(limit):
    rng = np.random.default_rng(limit)
    whole = make_document(rng.integers(0, 50, 9), rng.integers(0, 2, 9) > 0)
    pieces = [whole.piece(start, min(start + limit, 9)) for start in range(0, 9, limit)]
    assert np.concatenate([piece.ids for piece in pieces]).tolist() == whole.ids.tolist()
    assert np.concatenate([piece.labels() for piece in pieces]).tolist() == whole.labels().tolist()
    assert sum(piece.num_targets for piece in pieces) == whole.num_targets


def test_cutting_gives_up_what_follows():
    cut = make_document([1, 2, 3, 4], [True] * 4).first(2)
    assert cut.labels().tolist() == [2, IGNORE_INDEX]


def test_pad_equal_to_eos_does_not_matter_since_masks_come_from_lengths():
    document = make_document([5, 6, 7, 2], [True] * 4)
    assert document.labels().tolist() == [6, 7, 2, IGNORE_INDEX]


def test_fingerprint_sees_ids_masks_tails_and_order():
    a, b = make_document([1, 2], [0, 1]), make_document([1, 3], [0, 1])
    variants = [
        [a, b],
        [b, a],
        [a, make_document([1, 3], [0, 0])],
        [a, make_document([1, 3], [0, 1], 4)],
        [make_document([1, 2, 1, 3], [0, 1, 0, 1])],
    ]
    assert len({InMemoryDocuments(v).fingerprint for v in variants}) == len(variants)
    assert Fingerprint().text() == InMemoryDocuments([]).fingerprint


def test_documents_in_memory_know_their_totals():
    documents = InMemoryDocuments([make_document([1, 2, 3], [0, 1, 1]), make_document([4], [0])])
    assert documents.lengths.tolist() == [3, 1]
    assert documents.metadata["num_tokens"] == 4
    assert documents.metadata["num_target_tokens"] == 2
    assert documents.metadata["vocab_size"] == 5
