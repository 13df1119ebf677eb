"""The load of each expert over time: for each layer a map of colors, experts by iterations. As SVG text."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean

from megatron.tools.reporting.files import Points
from megatron.tools.reporting.schedule_picture import box, text

_COLUMNS, _WIDTH, _HEIGHT, _GAP = 3, 380, 150, 24
_MOST_LAYERS, _MOST_CELLS = 12, 20_000
_TOP = 34
_IDLE, _EQUAL, _BUSY = (0x2B, 0x6C, 0xB0), (0xF7, 0xF7, 0xF7), (0xB3, 0x2D, 0x2D)
"""Colors of an expert without tokens, with an equal share, and with ``_LARGEST`` times that."""
_LARGEST = 2.0


def draw_expert_loads(loads: Mapping[int, Mapping[int, Points]]) -> str:
    """The loads of the experts of each layer, from above each iteration's; of many layers some, evenly chosen."""
    layers = _evenly(list(loads), _MOST_LAYERS)
    rows = -(-len(layers) // _COLUMNS)
    cells = max(_MOST_CELLS // sum(len(loads[layer]) for layer in layers), 2)
    parts = [*_legend()]
    for place, layer in enumerate(layers):
        x, y = place % _COLUMNS * (_WIDTH + _GAP), _TOP + place // _COLUMNS * (_HEIGHT + 2 * _GAP)
        parts += _map(f"layer {layer}", loads[layer], x, y, min(cells, 80))
    width, height = _COLUMNS * (_WIDTH + _GAP), _TOP + rows * (_HEIGHT + 2 * _GAP)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='100%' "
        "font-family='Helvetica, Arial, sans-serif'>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _evenly(items: Sequence[int], most: int) -> list[int]:
    """At most so many of the items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def _legend() -> Iterator[str]:
    yield text(0, 16, "load of an expert, as a multiple of an equal share:")
    for number, load in enumerate((0.0, 0.5, 1.0, 1.5, _LARGEST)):
        x = 320 + 90 * number
        yield box(x, 4, 14, 14, _color(load))
        yield text(x + 20, 16, f"{load:g}" + (" or more" if load == _LARGEST else ""))


def _map(title: str, experts: Mapping[int, Points], x: float, y: float, most: int) -> Iterator[str]:
    """The map of a layer: a row for each expert, a column for one or several logged iterations."""
    iterations = sorted({iteration for points in experts.values() for iteration in points})
    size = -(-len(iterations) // most)
    columns = [iterations[begin : begin + size] for begin in range(0, len(iterations), size)]
    width, height = _WIDTH / len(columns), _HEIGHT / len(experts)
    yield text(x, y + 10, f"{title}: experts 0 to {max(experts)}, iterations {iterations[0]:,} to {iterations[-1]:,}")
    for row, (expert, points) in enumerate(experts.items()):
        for column, group in enumerate(columns):
            found = [points[iteration] for iteration in group if iteration in points]
            if found:
                tip = f"{title}, expert {expert}, iteration {group[-1]:,}: {mean(found):.2f}"
                left, top = x + column * width, y + 18 + row * height
                yield box(left, top, width + 0.3, height - (1 if height > 4 else 0), _color(mean(found)), tip)


def _color(load: float) -> str:
    """From blue by way of white to red."""
    share = min(load, _LARGEST)
    ends, part = ((_IDLE, _EQUAL), share) if share <= 1 else ((_EQUAL, _BUSY), (share - 1) / (_LARGEST - 1))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(*ends, strict=True))
