"""The reference page and the JSON schema speak of the schema as it is."""

from __future__ import annotations

from pathlib import Path

from freight.config.keys import dotted, every_key
from freight.config.reference import SECTIONS, json_schema, page
from freight.config.schema import Config

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_the_generated_one():
    assert DOCS.read_text(encoding="utf-8") == page(), "run: python -m freight.config.reference > docs/configuration.md"


def test_every_key_is_on_the_page_and_says_what_it_means():
    text = page()
    for path in every_key(Config):
        assert f"| `{path[-1]}` |" in text, dotted(path)
    for section in SECTIONS.values():
        for name, field in section.model_fields.items():
            assert field.description or name in ("optimizer", "schedule"), f"{section.__name__}.{name}"


def test_the_json_schema_is_closed_and_uses_the_names_of_the_file():
    schema = json_schema()
    assert schema["additionalProperties"] is False
    checkpoint = schema["$defs"]["CheckpointConfig"]["properties"]
    assert "async" in checkpoint
    assert "asynchronous" not in checkpoint
