"""What a configuration means on a number of ranks: sizes, steps, kernels and groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from freight.config.adapter_targets import AdapterTargets
from freight.config.architecture import Architecture
from freight.config.schema import Config
from freight.ops.attention_backends import Choice, Hardware
from freight.planner.execution import ExecutionPlan


class DataFacts(NamedTuple):
    """What packing knows of the training data.

    Args:
        num_documents: Documents of an epoch.
        num_rows: Rows of an epoch.
        num_tokens: Real tokens of an epoch.
        max_length: Longest document, in tokens.
        pack_size: Tokens of a row, when a packed file decides it.
        algorithm: How the rows were packed.
        mixture: The shares of sources with weights, in words.
        epoch_rows: Rows of each epoch of the run, where they were counted; packed anew, they differ by a few.
    """

    num_documents: int
    num_rows: int
    num_tokens: int
    max_length: int
    pack_size: int | None = None
    algorithm: str | None = None
    mixture: tuple[str, ...] = ()
    epoch_rows: tuple[int, ...] = ()

    def rows_in(self, epoch: int) -> int:
        """Rows of an epoch; of the first, where no more is known."""
        return self.epoch_rows[epoch] if epoch < len(self.epoch_rows) else self.num_rows

    @property
    def packing_factor(self) -> float:
        """Documents per row, n."""
        return self.num_documents / self.num_rows


class Group(NamedTuple):
    """Parameters that are treated alike."""

    tensors: int
    parameters: int


@dataclass(frozen=True)
class Plan:
    """What a configuration means on a number of ranks.

    Args:
        config: The configuration.
        arch: The architecture.
        execution: How microbatches are dealt out to ranks, and how blocks are run.
        pack_size: Tokens of a row.
        micro_batch_tokens: Tokens of a microbatch, over the context ranks that share it.
        rows_per_step: Rows of an optimizer step over all ranks; None while documents per step need the data.
        total_steps: Optimizer steps; None while epochs need the data.
        decaying: Trained weights under weight decay.
        not_decaying: Trained norms, biases and lengths.
        frozen: What an adapter leaves as it is.
        attention: Kernels of the longest document alone.
        packed_attention: Kernels of a row of several documents.
        hardware: Of the device that computes.
        data: What is known of the data.
        adapted: Modules of the adapter; None without one.
    """

    config: Config
    arch: Architecture
    execution: ExecutionPlan
    pack_size: int
    micro_batch_tokens: int
    rows_per_step: int | None
    total_steps: int | None
    decaying: Group
    not_decaying: Group
    frozen: Group
    attention: Choice
    packed_attention: Choice
    hardware: Hardware
    data: DataFacts | None
    adapted: AdapterTargets | None = None

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of context ranks, that work on different microbatches."""
        return self.execution.data_ranks

    @property
    def rows_per_microbatch(self) -> int:
        """Rows of a microbatch."""
        return self.micro_batch_tokens // self.pack_size

    @property
    def microbatches_per_step(self) -> int | None:
        """Microbatches that each data rank accumulates."""
        if self.rows_per_step is None:
            return None
        return math.ceil(self.rows_per_step / (self.rows_per_microbatch * self.data_ranks))

    @property
    def filler_rows(self) -> int:
        """Rows without labels that complete the last microbatches of a step."""
        if self.rows_per_step is None or self.microbatches_per_step is None:
            return 0
        return self.microbatches_per_step * self.rows_per_microbatch * self.data_ranks - self.rows_per_step

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a step, padding inside rows included, fillers not."""
        return None if self.rows_per_step is None else self.rows_per_step * self.pack_size

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch, once the data is known."""
        if self.data is None or self.rows_per_step is None:
            return None
        whole, tail = divmod(self.data.num_rows, self.rows_per_step)
        return whole + (tail > 0 and not self.config.data.drop_last)
