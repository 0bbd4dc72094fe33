"""Character offsets of byte-level tokens from the tokens alone: the tokenizer need not keep track of them.

A byte-level token stands for a fixed string of bytes. Where the strings of all tokens of a text, joined, are the text,
each token covers the bytes that its own string has there; there is no other way. That is checked for every text, at a
tenth of the cost of having the tokenizer count offsets and handing them over as Python objects. Tokenizers of other
kinds, and texts that are changed on the way, are for the tokenizer's own offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

LOW, HIGH = (33, 161, 174), (127, 173, 256)  # bytes that stand for themselves in the byte-level alphabet


class ByteTokens:
    """The bytes of every token of a byte-level tokenizer.

    Args:
        pieces: Bytes of each token, by id.
    """

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = dict(pieces)
        self._lengths = np.zeros(max(pieces, default=-1) + 1, dtype=np.int64)
        self._lengths[list(pieces)] = [len(piece) for piece in pieces.values()]

    def offsets(self, text: str, ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """First character of each token, and the one behind its last; None where the tokens are not the text.

        A character of several bytes may belong to several tokens; each of them covers all of it.

        Args:
            text: What was tokenised.
            ids: Its tokens.
        """
        content = text.encode("utf-8", "surrogatepass")
        try:
            if b"".join(map(self._pieces.__getitem__, ids)) != content:
                return None
        except KeyError:
            return None
        lengths = self._lengths[np.asarray(ids, dtype=np.int64)]
        stops = lengths.cumsum()
        starts = stops - lengths
        if len(content) == len(text):
            return starts, stops
        # Which character each byte belongs to: every byte but a continuation byte begins one.
        characters = ((np.frombuffer(content, dtype=np.uint8) & 0xC0) != 0x80).cumsum() - 1
        covered = lengths > 0
        starts[covered], stops[covered] = characters[starts[covered]], characters[stops[covered] - 1] + 1
        return starts, stops


def byte_tokens(vocabulary: Mapping[str, int], added: Mapping[int, str]) -> ByteTokens:
    """The bytes of the tokens of a byte-level vocabulary; tokens not written in its alphabet are left out.

    Args:
        vocabulary: Token -> id.
        added: Id -> text of tokens that are found in the text as they stand.
    """
    alphabet = byte_alphabet()
    pieces: dict[int, bytes] = {}
    for token, id in vocabulary.items():
        codes = [alphabet.get(symbol) for symbol in token]
        if None not in codes:
            pieces[id] = bytes(code for code in codes if code is not None)
    pieces.update({id: text.encode("utf-8") for id, text in added.items()})
    return ByteTokens(pieces)


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte: itself where it can be seen, else the next one from 256 on."""
    plain = [byte for low, high in zip(LOW, HIGH, strict=True) for byte in range(low, high)]
    hidden = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
