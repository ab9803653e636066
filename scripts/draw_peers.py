"""Draws docs/figures/peers.svg from the figures in docs/figures/peers.json:
`python scripts/draw_peers.py [--check]`."""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
WIDTH, LEFT, BAR_HEIGHT, GAP, GROUP_GAP, TOP = 860, 190, 20, 4, 34, 62
COLOURS = ("#00897b", "#90a4ae", "#b0bec5", "#cfd8dc")


def svg(figures: dict[str, Any]) -> str:
    """Horizontal bars, one group for each pattern, one colour for each engine."""
    engines = figures["engines"]
    largest = max(value for engine in engines for value in engine["values"])
    scale = (WIDTH - LEFT - 80) / largest
    group_height = len(engines) * (BAR_HEIGHT + GAP) + GROUP_GAP
    height = TOP + len(figures["patterns"]) * group_height + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(figures['title'])}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="14" font-weight="600" fill="#263238">{escape(figures["title"])}</text>',
        f'<text x="12" y="43" font-size="11" fill="#607d8b">{escape(figures["source"])}</text>',
    ]
    for group, pattern in enumerate(figures["patterns"]):
        y = TOP + group * group_height
        parts.append(f'<text x="12" y="{y + 14}" font-weight="600" fill="#263238">{escape(pattern)}</text>')
        for index, engine in enumerate(engines):
            parts += _bar(engine["name"], engine["values"][group], scale, y + 22 + index * (BAR_HEIGHT + GAP), index)
    return "\n".join([*parts, "</svg>", ""])


def _bar(name: str, value: float, scale: float, y: int, index: int) -> list[str]:
    width, middle = value * scale, y + BAR_HEIGHT - 5
    weight = "600" if index == 0 else "400"
    return [
        f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end" fill="#37474f" font-weight="{weight}">'
        f"{escape(name)}</text>",
        f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="2" fill="{COLOURS[index]}"/>',
        f'<text x="{LEFT + width + 6:.1f}" y="{middle}" fill="#37474f" font-weight="{weight}">{value}</text>',
    ]


def main() -> int:
    picture = svg(json.loads((FIGURES / "peers.json").read_text()))
    target = FIGURES / "peers.svg"
    if "--check" in sys.argv[1:]:
        return int(target.read_text() != picture)
    target.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
