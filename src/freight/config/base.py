"""The base of every section: frozen, and closed to keys it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One mapping of the configuration. Unknown keys are faults, numbers are finite, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
