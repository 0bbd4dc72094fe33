"""Text cut at every row: nothing is lost, and a piece still predicts the first token of the next."""

from __future__ import annotations

from freight.data.documents import InMemoryDocuments, make_document
from freight.data.load.microbatch import build_microbatch
from freight.data.pack.document_rows import DocumentRows


def test_pieces_of_documents_keep_every_input_and_every_target() -> None:
    texts = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]
    documents = InMemoryDocuments([make_document(ids, [True] * len(ids)) for ids in texts])
    source = DocumentRows(documents, "split", 4, shuffle=False)
    rows = [source.row(0, 0, number) for number in range(source.num_rows)]
    spans = [
        row.ids[start : start + length].tolist()
        for row in rows
        for start, length in zip(row.lengths.cumsum() - row.lengths, row.lengths, strict=True)
    ]
    assert spans == [[1, 2, 3, 4], [5], [6, 7], [8], [9, 10], [11]]
    assert [row.num_tokens for row in rows] == [4, 4, 3]
    labels = {}
    for row in rows:
        batch = build_microbatch([row], num_rows=1, pack_size=4)
        labels |= dict(zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True))
        assert batch.position_ids[0] == 0
    labels.pop(0)  # padding of the last row
    assert labels == {1: 2, 2: 3, 3: 4, 4: 5, 5: -100, 6: 7, 7: -100, 8: 9, 9: 10, 10: -100, 11: -100}
