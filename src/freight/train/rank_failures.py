"""What the ranks of a run tell each other when one of them fails, so that the user reads the first one's words.

A rank that fails writes what happened to the store that brought the group together, then ends. The others see a
collective fail, since its connections close, and look there why.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from freight.errors import FreightError

KEY = "freight/failed"
WAIT_SECONDS = 5.0
WORDS_OF_LOST_PEERS = ("gloo", "nccl", "connection", "peer", "timed out", "timeout", "socket", "store")


def failure_of(error: BaseException, place: str) -> str:
    """What made a run of several ranks fail: this rank's error, or that of the rank which failed first.

    Args:
        error: What was raised here.
        place: Where this rank stood: `at step 3`.
    """
    words = one_line(error)
    if dist.get_world_size() == 1:
        return words
    if not _from_a_lost_peer(error):
        return announce(error, place)
    return _announced() or (
        f"rank {dist.get_rank()} lost another rank {place}: it was ended, or did not answer in time. Its own output "
        "and the system's log (out of memory?) say more; then go on with --resume auto."
    )


def announce(error: BaseException, place: str) -> str:
    """Tell the other ranks of an error here, unless another rank was faster; returns what the first one said.

    Args:
        error: What was raised here.
        place: Where this rank stood.
    """
    if dist.get_world_size() == 1:
        return one_line(error)
    message = f"rank {dist.get_rank()} failed {place}: {one_line(error)}"
    try:
        return _store().compare_set(KEY, "", message).decode()
    except (RuntimeError, ValueError):
        return message  # the store went with another rank


def one_line(error: BaseException) -> str:
    """An error's kind and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _from_a_lost_peer(error: BaseException) -> bool:
    """Whether an error is that of a collective whose other end has gone."""
    if isinstance(error, FreightError):
        return False  # its words are the user's: a folder may be called /mnt/store
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in WORDS_OF_LOST_PEERS)


def _announced() -> str | None:
    """What the first rank that failed wrote; None if none does so in time."""
    store = _store()
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            if store.check([KEY]):
                return store.get(KEY).decode()
        except (RuntimeError, ValueError):
            return None
        time.sleep(0.05)
    return None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
