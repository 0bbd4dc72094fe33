"""Speed between two log lines: tokens, seconds, model FLOPs, and how long the loop waited for data."""

from __future__ import annotations

import torch

from freight.config.architecture import Architecture
from freight.data.load.loader import StepData
from freight.train.flops import Peak, Trained, peak_memory_bytes, step_flops

ETA_MEMORY = 0.9


class Throughput:
    """Adds up steps until it is asked for metrics.

    Args:
        arch: For the FLOP count.
        peak: Rate that utilisation is measured against; None leaves it out.
        device: Whose memory is reported.
        trained: What has gradients; everything by default.
        ranks: Of the run.
        context_ranks: Ranks that share this rank's microbatches, and so their FLOPs.
    """

    def __init__(
        self,
        arch: Architecture,
        peak: Peak | None,
        device: torch.device,
        trained: Trained | None = None,
        *,
        ranks: int = 1,
        context_ranks: int = 1,
    ) -> None:
        self._arch = arch
        self._trained = trained
        self._peak = peak
        self._device = device
        self._ranks, self._context_ranks = ranks, context_ranks
        self._smooth_seconds: float | None = None
        self._reset()

    def add(self, data: StepData, tokens: int, seconds: float, data_seconds: float) -> None:
        """Count one step.

        Args:
            data: What this data rank computed.
            tokens: Real tokens of all data ranks.
            seconds: Of the whole step, waiting for data included.
            data_seconds: Of the wait alone.
        """
        flops = step_flops(
            self._arch,
            (n for batch in data.microbatches for n in batch.lengths if n),
            label_tokens=data.num_targets,
            trained=self._trained,
        )
        self._steps += 1
        self._tokens += tokens
        self._here += data.num_tokens
        self._slots += sum(batch.tokens for batch in data.microbatches)
        self._seconds += seconds
        self._data_seconds += data_seconds
        self._model_flops += flops.model / self._context_ranks
        self._executed_flops += flops.executed / self._context_ranks
        before = seconds if self._smooth_seconds is None else self._smooth_seconds
        self._smooth_seconds = ETA_MEMORY * before + (1 - ETA_MEMORY) * seconds

    def eta_seconds(self, steps_left: int) -> float | None:
        """Time that so many steps will take, from a moving average."""
        return None if self._smooth_seconds is None else self._smooth_seconds * steps_left

    def metrics(self) -> dict[str, float]:
        """Averages since the last call."""
        rate = self._tokens / self._seconds
        values = {
            "perf/tokens_per_second": rate,
            "perf/tokens_per_second_per_device": rate / self._ranks,
            "perf/step_seconds": self._seconds / self._steps,
            "perf/data_seconds": self._data_seconds / self._steps,
            "memory/peak_bytes": peak_memory_bytes(self._device),
            "data/efficiency": self._here / self._slots,
        }
        if self._peak is not None:
            values["perf/mfu"] = self._model_flops / self._seconds / self._peak.flops_per_second
            values["perf/hfu"] = self._executed_flops / self._seconds / self._peak.flops_per_second
        self._reset()
        return values

    def _reset(self) -> None:
        self._steps = self._tokens = self._here = self._slots = 0
        self._seconds = self._data_seconds = self._model_flops = self._executed_flops = 0.0
