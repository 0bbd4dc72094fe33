"""The errors a user can see, and how several of them are shown at once.

A message says what is wrong, the value, and how to fix it. `ConfigError` carries every fault found, so that a user
corrects a config once and not once per fault.
"""

from __future__ import annotations

from collections.abc import Sequence


class FreightError(Exception):
    """Base of every error that is the user's to fix; the command line prints it as one line, without a traceback."""


class ConfigError(FreightError, ValueError):
    """Faults in a configuration, all of them together.

    Args:
        faults: One finished sentence each: key, value, fix.
    """

    def __init__(self, *faults: str) -> None:
        self.faults: Sequence[str] = faults
        super().__init__("\n".join(faults))


class LayoutError(ConfigError):
    """A batch whose `cu_seqlens`, lengths or positions cannot be right."""


class DataError(FreightError, ValueError):
    """A record, file or template that cannot be used; names file, line and field."""


class CheckpointError(FreightError, RuntimeError):
    """Weights or saved state that are missing, damaged or do not fit."""


class OffloadError(FreightError, RuntimeError):
    """A place for tensors off the device that cannot be had, is too small, or failed."""
