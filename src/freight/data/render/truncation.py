"""What happens to a document longer than `data.sequence_length`. Ids and mask are cut together, in one place."""

from __future__ import annotations

from freight.config.schema import Truncation
from freight.data.documents import Document, make_document
from freight.data.read.records import Reason, RecordFault
from freight.errors import DataError

POLICIES: dict[str, tuple[Truncation, ...]] = {
    "text": ("error", "drop", "cut_right", "cut_left", "split"),
    "prompt_completion": ("error", "drop", "cut_right", "cut_left"),
    "chat": ("error", "drop", "cut_right", "drop_oldest_turns"),
}


class TooLong(RecordFault):
    """A document above the limit that its policy does not shorten.

    Args:
        tokens: Its length.
        limit: `data.sequence_length`.
    """

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(Reason.TOO_LONG, "", f"{tokens:,} tokens > data.sequence_length {limit}")
        self.tokens = tokens


def check_policy(policy: Truncation, shape: str) -> None:
    """Refuse a policy that a kind of sample does not allow.

    Args:
        policy: `data.truncation`.
        shape: `text`, `prompt_completion` or `chat`.

    Raises:
        DataError: Says why, and what is allowed.
    """
    if policy in POLICIES[shape]:
        return
    allowed = ", ".join(POLICIES[shape])
    if policy == "split":
        raise DataError(f"data.truncation split cuts answers from their prompts; with {shape} use one of {allowed}")
    raise DataError(f"data.truncation {policy} is not for {shape}; use one of {allowed}")


def shorten_document(document: Document, policy: Truncation, limit: int, front: int) -> list[Document]:
    """Apply a policy that needs no rendering to a document above the limit.

    Args:
        document: Longer than `limit`.
        policy: Of its source.
        limit: `data.sequence_length`.
        front: Tokens that `cut_left` keeps in front (BOS).

    Returns:
        What is left: one document, or for `split` all its pieces.

    Raises:
        RecordFault: `too_long`, or `no_target` where no target is left.
    """
    match policy:
        case "split":
            return [
                document.piece(start, min(start + limit, len(document))) for start in range(0, len(document), limit)
            ]
        case "cut_right":
            left = document.first(limit)
        case "cut_left":
            rest = len(document) - (limit - front)
            ids, mask = document.ids, document.loss_mask
            left = make_document([*ids[:front], *ids[rest:]], [*mask[:front], *mask[rest:]])
        case _:
            raise TooLong(len(document), limit)
    if left.num_targets == 0:
        raise RecordFault(
            Reason.NO_TARGET, "", f"no supervised token is left of {len(document):,} after {policy} to {limit}"
        )
    return [left]
