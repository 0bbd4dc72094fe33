"""One chunk through the model before the first step of a streamed run.

It compiles, loads kernels, opens communicators and fills allocators at the length that the run uses, which is a chunk,
at the price of one chunk; a first step would do it at the length of a whole row.
"""

from __future__ import annotations

from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.parallel.data import set_last_microbatch
from freight.train.setup import Trainable


def warm_up(trainable: Trainable, tokens: int) -> None:
    """Forward and backward on a document without labels; parameters, gradients and generators stay as they were.

    Args:
        trainable: Before its first step.
        tokens: Of the document: a chunk, over all context ranks.
    """
    batch = TokenBatch.from_documents([[0] * tokens], [[IGNORE_INDEX] * tokens])
    set_last_microbatch(trainable.model, True)
    trainable.model(trainable.execution.deal(batch).to(trainable.device)).objective.backward()
    trainable.optimizer.zero_grad(set_to_none=True)
