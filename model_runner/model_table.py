"""The table of well-known models in docs/kv-cache.md, made from their configurations:

    python -m model_runner.model_table docs/models.json docs/kv-cache.md

writes it into the page, between its two marks. The figures are KVCacheSpec's, as `plimsoll plan` prints them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_runner.core.block_layout import BlockLayout
from model_runner.core.kv_spec import KVCacheSpec, LayerGroup
from model_runner.errors import ModelNotServable
from model_runner.worker.model_config import resolve

BEGIN = "<!-- made by python -m model_runner.model_table docs/models.json docs/kv-cache.md -->"
END = "<!-- end of the table -->"
CONTEXTS = {"4K": 4096, "32K": 32768, "128K": 131072}


def table(models: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: one row for each {"name", "config"}. Raises ModelNotPriced."""
    head = ["model", "layers", "bytes a token, at first", "for ever", "state", *CONTEXTS, "in blocks"]
    rows = [head, ["---"] * 2 + ["---:"] * (len(head) - 3) + ["---"]]
    rows += [_row(str(model["name"]), model["config"]) for model in models]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(name: str, config: Mapping[str, Any]) -> list[str]:
    fields = resolve(config)
    spec = KVCacheSpec.from_config(fields)
    try:
        BlockLayout.from_spec(spec, block_size=16)
        served = "yes"
    except ModelNotServable:
        served = "not yet"
    return [
        name,
        ", ".join(_layers(group) for group in spec.groups),
        f"{spec.bytes_per_token:,}",
        f"{spec.growing_bytes_per_token:,}",
        f"{spec.fixed_bytes_per_sequence / 2**20:.1f} MiB" if spec.fixed_bytes_per_sequence else "-",
        *(f"{spec.sequence_bytes(tokens) / 2**20:,.0f} MiB" for tokens in CONTEXTS.values()),
        served,
    ]


def _layers(group: LayerGroup) -> str:
    reach = "" if group.reach is None else f" ({group.reach})"
    return f"{len(group.layers)} {group.kind}{reach}"


def insert(page: str, made: str) -> str:
    """The page with the table between its marks. Raises ValueError where it has none."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def main() -> None:
    models, page = Path(sys.argv[1]), Path(sys.argv[2])
    made = table(json.loads(models.read_text(encoding="utf-8"))["models"])
    page.write_text(insert(page.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
