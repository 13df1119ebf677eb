"""The few shapes that our pictures are made of, as SVG text. Nothing is loaded from elsewhere."""

import math
from collections.abc import Iterable
from html import escape

FONT = "font-family='Helvetica, Arial, sans-serif'"
INK, FAINT = "#222222", "#767676"


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    """A whole picture on white."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' width='{width:g}' "
        f"height='{height:g}' {FONT}>\n<rect width='100%' height='100%' fill='white'/>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", fill: str = INK) -> str:
    """Words whose baseline is at ``y``; ``anchor`` is start, middle or end."""
    place = f"x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' text-anchor='{anchor}'"
    return f"<text {place} fill='{fill}'>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, told: str = "") -> str:
    """A rectangle, and what is ``told`` where the mouse is over it."""
    title = f"<title>{escape(told)}</title>" if told else ""
    return f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}' fill='{fill}'>{title}</rect>"


def line(points: Iterable[tuple[float, float]], stroke: str, width: float = 1.5, dash: str = "") -> str:
    """A line through ``points``."""
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    return f"<polyline points='{path}' fill='none' stroke='{stroke}' stroke-width='{width:g}'{dashes}/>"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
