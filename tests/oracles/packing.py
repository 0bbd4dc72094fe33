"""Packing as anyone would write it first: quadratic, obvious, and the judge of the fast versions."""

from __future__ import annotations

from itertools import groupby


def first_fit(lengths, pack_size):
    """The lowest-numbered row with room."""
    rows = []
    for document, length in enumerate(lengths):
        fits = [row for row in rows if sum(lengths[d] for d in row) + length <= pack_size]
        if fits:
            fits[0].append(document)
        else:
            rows.append([document])
    return rows


def best_fit(lengths, pack_size):
    """The row with the least room that suffices, then the lowest number."""
    rows = []
    for document, length in enumerate(lengths):
        fits = [row for row in rows if sum(lengths[d] for d in row) + length <= pack_size]
        if fits:
            max(fits, key=lambda row: sum(lengths[d] for d in row)).append(document)
        else:
            rows.append([document])
    return rows


def split(lengths, multiple, pack_size):
    """Every token of the concatenation by itself, cut every `pack_size`; spans are `(document, start, length)`."""
    slots = [(d, t) for d, length in enumerate(lengths) for t in range(-(-length // multiple) * multiple)]
    rows = [slots[i : i + pack_size] for i in range(0, len(slots), pack_size)]
    spans = []
    for row in rows:
        pieces = [(d, [t for _, t in group]) for d, group in groupby(row, key=lambda slot: slot[0])]
        spans.append([(d, ts[0], len([t for t in ts if t < lengths[d]])) for d, ts in pieces])
    return spans


def pack(lengths, algorithm, pack_size, permutation, renumbering, multiple=1):
    """The whole rule: order, place, renumber.

    Args:
        permutation: `n -> list`, the order of documents.
        renumbering: `n -> list`, used for rows and for documents inside a row: element at each place.

    Returns:
        Rows of `(document, start, length)`.
    """
    padded = [-(-length // multiple) * multiple for length in lengths]
    order = permutation(len(lengths))
    if algorithm == "none":
        return [[(d, 0, length)] for d, length in enumerate(lengths)]
    if algorithm.endswith("decreasing"):
        order = sorted(order, key=lambda d: -padded[d])
    if algorithm == "split":
        rows = [
            [(order[d], start, length) for d, start, length in row]
            for row in split([lengths[d] for d in order], multiple, pack_size)
        ]
    else:
        place = best_fit if algorithm == "best_fit_decreasing" else first_fit
        rows = [[(order[d], 0, lengths[order[d]]) for d in row] for row in place([padded[d] for d in order], pack_size)]
    new_rows, new_documents = renumbering(len(rows)), renumbering(len(lengths))
    return [sorted(rows[row], key=lambda span: new_documents.index(span[0])) for row in new_rows]


def least_rows(lengths, pack_size):
    """The exact optimum, by trying every assignment; for a handful of documents."""
    best = len(lengths)

    def place(document, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if document == len(lengths):
            best = len(rooms)
            return
        for row, room in enumerate(rooms):
            if room >= lengths[document]:
                place(document + 1, [*rooms[:row], room - lengths[document], *rooms[row + 1 :]])
        place(document + 1, [*rooms, pack_size - lengths[document]])

    place(0, [])
    return best
