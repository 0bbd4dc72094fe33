"""Two chunks through the model before the first step of a streamed run.

They compile, load kernels, open communicators and fill allocators at the lengths that the run uses, which are those of
a chunk and of the last one; a first step would do it on a whole row. It takes two, because a chunk makes keys anew only
for one that comes after it.
"""

from __future__ import annotations

from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.parallel.data import set_last_microbatch
from freight.train.setup import Trainable


def warm_up(trainable: Trainable) -> None:
    """Forward and backward on a document without labels; parameters, gradients and generators stay as they were.

    Args:
        trainable: Streamed; before its first step.
    """
    plan = trainable.execution.plan
    assert plan.stream is not None
    chunk = plan.stream.chunk_tokens
    tokens = chunk + (plan.tokens % chunk or chunk)
    batch = TokenBatch.from_documents([[0] * tokens], [[IGNORE_INDEX] * tokens])
    set_last_microbatch(trainable.model, True)
    trainable.model(trainable.execution.deal(batch).to(trainable.device)).objective.backward()
    trainable.optimizer.zero_grad(set_to_none=True)
