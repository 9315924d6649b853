"""Writes the JSON Schemas of all public shapes to docs/schemas/. A test compares them with what is checked in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from events import envelope
from model.codec import json_schema
from model.job_spec import JobSpec
from model.manifest import Head, Manifest
from model.placement import Placement

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schemas"


def schemas() -> dict[str, bytes]:
    """The text of each schema file, by its name."""
    shapes: dict[str, dict[str, Any]] = {
        "job-spec.v1": JobSpec.json_schema(),
        "placement.v1": json_schema(Placement),
        "manifest.v1": json_schema(Manifest),
        "head.v1": json_schema(Head),
        **{f"event.{kind}": schema for kind, schema in envelope.json_schemas().items()},
    }
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SORT_KEYS
    return {f"{name}.schema.json": orjson.dumps(_bare(schema), option=options) for name, schema in shapes.items()}


def _bare(node: Any) -> Any:
    # A class's docstring speaks to readers of the code; the descriptions of fields stay.
    if isinstance(node, dict):
        return {key: _bare(item) for key, item in node.items() if not (key == "description" and "properties" in node)}
    return [_bare(item) for item in node] if isinstance(node, list) else node


def main() -> None:
    """Writes every file, and removes those of shapes that are gone."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    texts = schemas()
    for path in FOLDER.glob("*.schema.json"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_bytes(text)


if __name__ == "__main__":
    main()
