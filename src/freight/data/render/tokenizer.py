"""Tokenizers: loaded from local files, identified by content, and run in batches with exact character offsets.

Offsets decide what is supervised, so they come from a private copy of the tokenizer without post-processor: some
post-processors trim spaces from offsets, which would hide what a token covers. Special tokens are parsed from the
text; none is added behind our back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from freight.data.render.byte_offsets import ByteTokens, byte_tokens
from freight.errors import DataError

if TYPE_CHECKING:  # processes that only encode start in 2 s without it, and in 5 with it
    from transformers import PreTrainedTokenizerBase

ROUND_TRIP_STRINGS = 64


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from disk; nothing is downloaded and no code of a repository is run.

    Args:
        path: A Hugging Face folder, a `tokenizer.json`, or a `.gguf` file.

    Raises:
        DataError: There is none, or it cannot be read, or it gives no character offsets.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise DataError(
            f"tokenizer {path}: no such folder or file (names on the hub are not supported: download it first)"
        )
    try:
        tokenizer = read_tokenizer(place)
    except DataError:
        raise
    except Exception as error:  # whatever the parsers of foreign files raise, the file is the user's to fix
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"tokenizer {path}: cannot be read: {reason}") from None
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer {path}: gives no character offsets; convert it to a tokenizer.json")
    return tokenizer


def read_tokenizer(place: Path) -> PreTrainedTokenizerBase:
    """Choose transformers' loader by what the path is."""
    import transformers  # noqa: PLC0415 - a second, not for processes that only encode

    if place.suffix == ".gguf":
        # AutoTokenizer would read the header slowly first, to build a config nobody asked for: 10 s against 1 s.
        return transformers.PreTrainedTokenizerFast.from_pretrained(
            str(place.parent), gguf_file=place.name, local_files_only=True
        )
    if place.is_dir():
        if not any((place / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
            raise DataError(f"tokenizer {place}: no tokenizer.json in the folder")
        return transformers.AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    if place.suffix != ".json":
        raise DataError(f"tokenizer {place}: expected a folder, a tokenizer.json or a .gguf file")
    if (place.parent / "tokenizer_config.json").exists():
        return transformers.AutoTokenizer.from_pretrained(str(place.parent), local_files_only=True)
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(place))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """BLAKE2b of what decides ids: equal for a moved copy, different after an edited special token."""
    content = json.loads(backend(tokenizer).to_str())
    content.pop("truncation", None)
    content.pop("padding", None)
    content["special"] = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return digest(content)


def digest(content: Any) -> str:
    """BLAKE2b of a value's canonical JSON."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The Rust tokenizer inside."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(inner, Tokenizer):
        raise DataError("the tokenizer gives no character offsets; convert it to a tokenizer.json")
    return inner


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id put where no token is; it has no influence on loss or gradients."""
    candidates = (single_id(tokenizer.pad_token_id), single_id(tokenizer.eos_token_id))
    return next((candidate for candidate in candidates if candidate is not None), 0)


def single_id(value: Any) -> int | None:
    """A special token's id, where the tokenizer has that token."""
    return value if isinstance(value, int) else None


def common_prefix(first: str, second: str) -> int:
    """Number of leading characters that two strings share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


class Encoded(NamedTuple):
    """Tokens of one text, with the characters that each covers.

    Args:
        ids: int64 `[tokens]`.
        starts: int64 `[tokens]`, first character.
        stops: int64 `[tokens]`, behind the last character.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


class Encoder:
    """Texts to tokens with offsets, in batches; and the special tokens that the rules of documents need.

    Can be sent to other processes, which then need not load the tokenizer.

    Args:
        tokenizer: Is left as it is, and not kept.

    Attributes:
        bos_id: Begin of sequence, if the tokenizer has it.
        eos_id: End of sequence, if the tokenizer has it.
        size: Tokens of the tokenizer.
        special_ids: int64, ids of tokens marked special, end of sequence included, sorted.
        front_ids: What the tokenizer's own post-processor puts in front of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        inner = Tokenizer.from_str(backend(tokenizer).to_str())
        inner.no_truncation()
        inner.no_padding()
        whole = Tokenizer.from_str(inner.to_str())
        inner.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
        self._inner = inner
        self._bytes = byte_tokens_of(inner)
        self.bos_id = single_id(tokenizer.bos_token_id)
        self.eos_id = single_id(tokenizer.eos_token_id)
        self.size = len(tokenizer)
        marked = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        self.special_ids = np.array(sorted(marked | set(tokenizer.all_special_ids)), dtype=np.int64)
        self.front_ids = front_ids(whole, inner)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokenise texts as they stand: special tokens in them are parsed, none is added."""
        if self._bytes is None:
            return self._encode_slowly(texts)
        encoded: list[Encoded] = []
        for text, encoding in zip(
            texts, self._inner.encode_batch_fast(list(texts), add_special_tokens=False), strict=True
        ):
            ids = encoding.ids
            offsets = self._bytes.offsets(text, ids)
            encoded.append(
                Encoded(np.array(ids, dtype=np.int64), *offsets) if offsets else self._encode_slowly([text])[0]
            )
        return encoded

    def _encode_slowly(self, texts: Sequence[str]) -> list[Encoded]:
        """With the tokenizer's own offsets, whatever kind it is."""
        encoded = []
        for encoding in self._inner.encode_batch(list(texts), add_special_tokens=False):
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            encoded.append(Encoded(np.array(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1]))
        return encoded

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Text of ids, special tokens included, spaces untouched."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def round_trip_warning(self, texts: Sequence[str]) -> str | None:
        """Says so if decoding does not give texts back, with an example; the tokenizer then normalises."""
        for text, encoded in zip(texts, self.encode(texts), strict=True):
            decoded = self.decode(encoded.ids)
            if decoded != text:
                at = common_prefix(text, decoded)
                return f"the tokenizer changes text: {text[at : at + 20]!r} becomes {decoded[at : at + 20]!r}"
        return None


def byte_tokens_of(tokenizer: Tokenizer) -> ByteTokens | None:
    """Bytes of each token of a byte-level tokenizer that changes no text; None for other kinds."""
    content = json.loads(tokenizer.to_str())
    if content.get("normalizer") is not None or '"ByteLevel"' not in json.dumps(content.get("pre_tokenizer")):
        return None
    added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
    return byte_tokens(tokenizer.get_vocab(with_added_tokens=False), added)


def front_ids(whole: Tokenizer, plain: Tokenizer) -> list[int]:
    """What a tokenizer puts in front of a text that its copy without post-processor does not."""
    ids, bare = whole.encode("a").ids, plain.encode("a", add_special_tokens=False).ids
    starts = range(len(ids) - len(bare) + 1)
    return next((ids[:start] for start in starts if ids[start : start + len(bare)] == bare), [])
