"""`freight schema`."""

from __future__ import annotations

import json


def schema() -> None:
    """Print the JSON schema of a config, for completion in editors."""
    from freight.config.reference import json_schema

    print(json.dumps(json_schema(), indent=2))
