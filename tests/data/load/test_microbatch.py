import numpy as np
import pytest
import torch

from freight.data.documents import make_document
from freight.data.load.microbatch import build_microbatch
from freight.data.pack.rows import Row


def row(*documents, tails=None):
    """A row of documents given as ids, all targets."""
    made = [make_document(ids, [True] * len(ids)) for ids in documents]
    return Row(
        ids=np.concatenate([d.ids for d in made]),
        loss_mask=np.concatenate([d.loss_mask for d in made]),
        lengths=np.array([len(d) for d in made]),
        tail_labels=np.array(tails or [-1] * len(made)),
        documents=np.arange(len(made)),
    )


def test_no_label_crosses_a_border():
    batch = build_microbatch([row([0, 1, 2], [10, 11, 12])], pack_size=6, num_rows=1)
    assert batch.labels.tolist() == [1, 2, -100, 11, 12, -100]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_full_row_has_no_empty_segment():
    batch = build_microbatch([row([1, 2, 3], [4, 5, 6, 7, 8])], pack_size=8, num_rows=1)
    assert batch.cu_seqlens == (0, 3, 8)
    assert batch.lengths == (3, 5)


def test_pads_of_a_row_are_a_segment_that_belongs_to_no_document():
    batch = build_microbatch([row([1, 2, 3], [4, 5, 6, 7, 8])], pack_size=10, num_rows=1, pad_id=9)
    assert batch.cu_seqlens == (0, 3, 8, 10)
    assert batch.lengths == (3, 5, 0)
    assert batch.documents == (0, 1, -1)
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0]
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert batch.max_seqlen == 5


def test_a_pad_id_that_is_also_end_of_text_hides_nothing():
    # pad = eos = 2: the document's own eos stays a target, the pads are none, though their ids are equal
    batch = build_microbatch([row([5, 6, 7, 2])], pack_size=6, num_rows=1, pad_id=2)
    assert batch.input_ids.tolist() == [5, 6, 7, 2, 2, 2]
    assert batch.labels.tolist() == [6, 7, 2, -100, -100, -100]
    assert batch.real_tokens == 4
    assert batch.valid.tolist() == [True] * 4 + [False] * 2


def test_a_pad_id_inside_a_document_stays_real():
    batch = build_microbatch([row([5, 2, 7])], pack_size=4, num_rows=1, pad_id=2)
    assert batch.lengths == (3, 0)
    assert batch.labels.tolist() == [2, 7, -100, -100]


def test_end_of_turn_is_not_end_of_document():
    # eos = 2 stands in the middle of the first document; boundaries come from lengths alone
    batch = build_microbatch([row([1, 5, 2, 6, 7], [1, 8])], pack_size=7, num_rows=1)
    assert batch.cu_seqlens == (0, 5, 7)
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_spans_take_multiples_with_their_pads_behind_them():
    batch = build_microbatch([row([1, 2, 3], [4, 5, 6, 7, 8])], pack_size=16, num_rows=1, document_multiple=4)
    assert batch.cu_seqlens == (0, 4, 12, 16)
    assert batch.lengths == (3, 5, 0)
    assert batch.labels.tolist() == [2, 3, -100, -100, 5, 6, 7, 8] + [-100] * 8


def test_a_tail_label_is_what_the_last_input_predicts():
    batch = build_microbatch([row([1, 2, 3, 4], tails=[5])], pack_size=4, num_rows=1)
    assert batch.labels.tolist() == [2, 3, 4, 5]


def test_unsupervised_tokens_have_no_label():
    document = make_document([1, 2, 3, 4], [False, False, True, True])
    made = Row(document.ids, document.loss_mask, np.array([4]), np.array([-1]), np.array([0]))
    assert build_microbatch([made], pack_size=4, num_rows=1).labels.tolist() == [-100, 3, 4, -100]


def test_missing_rows_are_padding_without_labels():
    batch = build_microbatch([row([1, 2, 3])], pack_size=4, num_rows=3)
    assert batch.tokens == 12
    assert batch.cu_seqlens == (0, 3, 4, 12)
    assert batch.labels.tolist() == [2, 3] + [-100] * 10
    empty = build_microbatch([], pack_size=4, num_rows=2)
    assert empty.cu_seqlens == (0, 8)
    assert empty.lengths == (0,)


@pytest.mark.parametrize("multiple", [1, 4])
def test_without_row_padding_only_documents_are_left(multiple):
    rows = [row([1, 2, 3]), row([4, 5])]
    batch = build_microbatch(rows, pack_size=8, num_rows=3, pad_rows=False, document_multiple=multiple)
    assert batch.tokens == (5 if multiple == 1 else 8)
    assert batch.lengths == (3, 2)
    assert build_microbatch([], pack_size=8, num_rows=1, pad_rows=False, document_multiple=multiple).real_tokens == 0


def test_tensors_are_int64_and_the_numbers_are_carried():
    batch = build_microbatch([row([1, 2])], pack_size=2, num_rows=1, seed=3, step=4, microbatch=5)
    assert {batch.input_ids.dtype, batch.labels.dtype, batch.position_ids.dtype} == {torch.int64}
    assert (batch.seed, batch.step, batch.microbatch) == (3, 4, 5)
