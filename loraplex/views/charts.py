"""Charts as inline SVG: bars, a line, a strip. Texts are escaped; colours are the page's (`html_report.py`, STYLE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 720
LABEL_WIDTH = 190
VALUE_WIDTH = 110
BAR_HEIGHT = 16
ROW_HEIGHT = 22
MAX_LABEL_CHARS = 28


@dataclass(frozen=True, slots=True)
class Bar:
    """shown: the value as it stands beside the bar."""

    label: str
    value: float
    shown: str


def bars(rows: Sequence[Bar], title: str) -> str:
    """One bar a row, the longest as wide as there is room."""
    if not rows:
        return ""
    room = WIDTH - LABEL_WIDTH - VALUE_WIDTH
    most = max(row.value for row in rows) or 1.0
    parts = [_bar(row, index * ROW_HEIGHT, room * max(0.0, row.value) / most) for index, row in enumerate(rows)]
    return _svg("".join(parts), len(rows) * ROW_HEIGHT, title)


def _bar(row: Bar, top: float, width: float) -> str:
    middle = top + ROW_HEIGHT / 2
    return (
        f'<text x="{LABEL_WIDTH - 8}" y="{middle:.1f}" class="label">{escape(shortened(row.label))}</text>'
        f'<rect x="{LABEL_WIDTH}" y="{top + (ROW_HEIGHT - BAR_HEIGHT) / 2:.1f}" width="{max(1.0, width):.1f}" '
        f'height="{BAR_HEIGHT}" rx="2" class="bar"><title>{escape(row.label)}: {escape(row.shown)}</title></rect>'
        f'<text x="{LABEL_WIDTH + width + 6:.1f}" y="{middle:.1f}" class="value">{escape(row.shown)}</text>'
    )


def line(values: Sequence[float], length_shown: str, title: str) -> str:
    """Values at equal distances over `length_shown`, from 0 to the largest."""
    if len(values) < 2:
        return ""
    height, left, bottom = 160, 60, 20
    most = max(values) or 1.0
    step = (WIDTH - left) / (len(values) - 1)
    points = [
        f"{left + index * step:.1f},{(height - bottom) * (1 - value / most) + 4:.1f}"
        for index, value in enumerate(values)
    ]
    floor = height - bottom + 4
    body = (
        f'<line x1="{left}" y1="{floor}" x2="{WIDTH}" y2="{floor}" class="axis"/>'
        f'<polyline points="{" ".join(points)}" class="line"/>'
        f'<text x="{left - 8}" y="10" class="label">{most:,.0f}</text>'
        f'<text x="{left - 8}" y="{floor}" class="label">0</text>'
        f'<text x="{WIDTH}" y="{height}" class="end">{escape(length_shown)}</text>'
    )
    return _svg(body, height + 8, title)


def strip(runs: Sequence[tuple[str, int]], title: str) -> str:
    """Neighbours of one kind side by side, each as wide as its share. The CSS class is `owner-` and the kind."""
    total = sum(count for _, count in runs)
    if not total:
        return ""
    parts, left = [], 0.0
    for kind, count in runs:
        width = WIDTH * count / total
        hint = f"<title>{escape(kind)}: {count}</title>"
        name = escape("".join(letter for letter in kind if letter.isalnum()))
        parts.append(f'<rect x="{left:.2f}" y="0" width="{width:.2f}" height="24" class="owner-{name}">{hint}</rect>')
        left += width
    return _svg("".join(parts), 24, title)


def shortened(text: str) -> str:
    return text if len(text) <= MAX_LABEL_CHARS else text[: MAX_LABEL_CHARS - 1] + "…"


def _svg(body: str, height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{body}</svg>'
    )
