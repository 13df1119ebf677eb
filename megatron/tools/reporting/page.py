"""The report of a run: a self-contained HTML page that needs no network."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from jinja2 import Environment
from PIL import Image

from megatron.common.errors import DataError
from megatron.common.formats import duration, with_prefix
from megatron.common.reading import parse_json, regular
from megatron.tools.inference.images import images_of, read_image
from megatron.tools.reporting.files import Points, Record
from megatron.tools.reporting.pictures import CURVE_KEYS, as_svg, draw, draw_curves, draw_expert_loads
from megatron.tools.reporting.timeline import PASSES, Measures, Timeline, measure

_MOST = 12
_PIXELS = 192


class Answer(NamedTuple):
    """A row of the table of answers to questions about images."""

    image: str
    """The image as a data URL; empty without an image."""
    question: str
    answer: str
    predicted: str
    right: bool


def read_answers(path: Path) -> list[Answer]:
    """The first answers in a predictions file of tools/evaluate.py, with images from the folder of its input.

    Raises DataError if the file or an image cannot be read.
    """
    try:
        with open(path, encoding="utf-8", opener=regular) as file:
            records = [parse_json(line) for line, _ in zip(file, range(_MOST), strict=False)]
        return [
            Answer(
                _url(record), record["question"], _text(record["answer"]), record["predicted"], bool(record["right"])
            )
            for record in records
        ]
    except OSError as error:
        raise DataError(f"--predictions {path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, DataError) as error:
        raise DataError(f"--predictions {path}: not what tools/evaluate.py --predictions writes ({error})") from None


def _text(answer: str | list[str]) -> str:
    return answer if isinstance(answer, str) else " or ".join(answer)


def _url(record: dict) -> str:
    """The first image of a question as a data URL of a small PNG."""
    images = images_of(record)
    if not images:
        return ""
    file = io.BytesIO()
    Image.fromarray(read_image(Path(record["folder"]) / images[0], _PIXELS)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


KEYS = (*CURVE_KEYS, "seconds_per_iteration", "loss_scale", "skipped_iterations", "consumed_tokens")

_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True)
_FRAME = _ENVIRONMENT.from_string("""\
<!DOCTYPE html>
<html lang='en'>
<head>
<meta charset='utf-8'>
<title>{{ name }}</title>
<style>
body { font-family: Helvetica, Arial, sans-serif; color: #222; max-width: 1220px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.7em; margin-bottom: 0; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ccc; }
svg { max-width: 100%; height: auto; } .missing { color: #767676; }
table { border-collapse: collapse; } td, th { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; }
th { color: #767676; font-weight: normal; } td.number, th.number { text-align: right; }
pre { font-size: 0.85em; background: #f6f6f6; padding: 1em; overflow-x: auto; }
{{ style | safe }}</style>
</head>
<body>
<h1>{{ name }}</h1>
{{ body | safe }}
</body>
</html>
""")
_SECTIONS = _ENVIRONMENT.from_string("""\
{% macro missing(what, flag) %}
<p class='missing'>No {{ what }} of this run: train with {{ flag }} to see it here.</p>
{% endmacro %}
{% macro pairs(rows) %}
<table>
{% for name, value in rows.items() %}
<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table>
{% endmacro %}
<h2>Result</h2>
{{ pairs(results) }}
<h2>Curves</h2>
{{ curves | safe }}
{% if experts %}
<h2>Experts</h2>
{{ experts | safe }}
{% endif %}
{% if answers %}
<h2>Answers</h2>
<table><tr><th></th><th>question</th><th>answer</th><th>predicted</th></tr>
{% for row in answers %}
<tr><td>{% if row.image %}<img src='{{ row.image }}' alt='' height='96'>{% endif %}</td><td>{{ row.question }}</td>
<td>{{ row.answer }}</td><td>{{ "right" if row.right else "wrong" }}: {{ row.predicted }}</td></tr>
{% endfor %}
</table>
{% endif %}
<h2>Layout</h2>
{{ pairs(record.description) if record else missing("run.json", "--run-dir") }}
{% if record and record.layouts | length > 1 %}
<table><tr><th class='number'>from iteration</th><th>layout</th></tr>
{% for first, layout in record.layouts.items() %}
<tr><td class='number'>{{ "{:,}".format(first) }}</td><td>{{ layout }}</td></tr>
{% endfor %}
</table>
{% endif %}
<h2>Plan against measurement</h2>
{% if record %}
<table><tr><th></th><th class='number'>planned</th><th class='number'>measured</th></tr>
{% for name, planned, measured in plan %}
<tr><th>{{ name }}</th><td class='number'>{{ planned }}</td><td class='number'>{{ measured }}</td></tr>
{% endfor %}
</table>
{% else %}
{{ missing("run.json", "--run-dir") }}
{% endif %}
<h2>Schedule</h2>
{% if schedule %}{{ schedule | safe }}{% else %}{{ missing("trace", "--trace") }}{% endif %}
<h2>Environment</h2>
{{ pairs(record.environment) if record else missing("run.json", "--run-dir") }}
<h2>Configuration</h2>
{% if record %}
<details><summary>all settings, and the DeepSpeed config</summary><pre>{{ config }}</pre></details>
{% else %}
{{ missing("run.json", "--run-dir") }}
{% endif %}
""")


def page(
    name: str,
    series: Mapping[str, Points],
    record: Record | None,
    timeline: Timeline | None,
    loads: Mapping[int, Mapping[int, Points]] = MappingProxyType({}),
    answers: Sequence[Answer] = (),
) -> str:
    """The page about the run ``name``. Sections without data name the flag that provides it.

    ``loads`` are the loads of each expert, by layer. Without ``loads`` or ``answers`` their sections are left out.
    """
    return frame(name, sections(series, record, timeline, loads, answers))


def frame(name: str, body: str, style: str = "") -> str:
    """A page with the title ``name`` around ``body``, which is HTML; ``style`` is added to the style sheet."""
    return _FRAME.render(name=name, body=body, style=style)


def sections(
    series: Mapping[str, Points],
    record: Record | None,
    timeline: Timeline | None,
    loads: Mapping[int, Mapping[int, Points]] = MappingProxyType({}),
    answers: Sequence[Answer] = (),
) -> str:
    """The sections of a page about a run, as HTML."""
    measures = measure(timeline) if timeline else None
    return _SECTIONS.render(
        results=_results(series),
        curves=as_svg(draw_curves({"": series})),
        experts=draw_expert_loads(loads) if loads else "",
        answers=answers,
        record=record,
        plan=_plan(record, series, timeline, measures) if record else [],
        schedule=draw(timeline, measures) if timeline and measures else "",
        config=json.dumps(record.config, indent=2) if record else "",
    )


def _results(series: Mapping[str, Points]) -> dict[str, str]:
    rows = {}
    for key, label in (("lm_loss", "training loss"), ("validation_loss", "validation loss")):
        for iteration, loss in list(series[key].items())[-1:]:
            rows[label] = f"{loss:.4f} at iteration {iteration:,}"
    if series["validation_loss"]:
        iteration, loss = min(series["validation_loss"].items(), key=lambda point: point[1])
        rows["lowest validation loss"] = f"{loss:.4f} at iteration {iteration:,}"
    for key, label, text, statistic in (
        ("tokens_per_second", "throughput, median", "{:,.0f} tokens/s".format, median),
        ("tflops_per_device", "speed of each device, median", _flops, median),
        ("seconds_per_iteration", "step, median", duration, median),
        ("memory_gb", "memory of rank 0, maximum", _gigabytes, max),
        ("consumed_tokens", "tokens", "{:,.0f}".format, max),
        ("skipped_iterations", "iterations skipped", "{:.0f}".format, max),
    ):
        if series[key]:
            rows[label] = text(statistic(series[key].values()))
    return rows


def _flops(tera: float) -> str:
    return with_prefix(tera * 1e12, "FLOP/s")


def _gigabytes(giga: float) -> str:
    return with_prefix(giga * 1e9, "B")


def _plan(
    record: Record, series: Mapping[str, Points], timeline: Timeline | None, measures: Measures | None
) -> list[tuple[str, str, str]]:
    """Rows of the table: quantity, planned value and measured value, of the last layout."""
    rows, begin = [], max(record.layouts, default=0)
    seconds, memory = (
        [value for iteration, value in series[key].items() if iteration >= begin]
        for key in ("seconds_per_iteration", "memory_gb")
    )
    if seconds and record.seconds is not None:
        rows.append(("step", duration(record.seconds), duration(median(seconds))))
    if memory and record.stages:
        extent = ", of the entire process" if record.environment.get("device") == "cpu" else ""
        planned_bytes = record.stages[0].memory
        rows.append(("memory of rank 0", with_prefix(planned_bytes, "B"), f"{_gigabytes(max(memory))}{extent}"))
    if timeline and measures:
        if measures.theory is not None:
            rows.append(("bubble", f"{measures.theory:.1%}", f"{measures.bubble:.1%}"))
        rows += _shares(record, timeline, measures.ranks)
    return rows


def _shares(record: Record, timeline: Timeline, ranks: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str]]:
    """Rows of the table: planned and measured share of each stage in the time of all passes."""
    busy = [
        sum(ranks[rank][share] for rank in stage for share in PASSES) for stage in zip(*timeline.pipelines, strict=True)
    ]
    if len(busy) != len(record.stages):
        return []  # the trace is of another layout
    return [
        (f"passes of stage {number}", f"{stage.share:.1%}", f"{seconds / max(sum(busy), 1e-12):.1%}")
        for number, (stage, seconds) in enumerate(zip(record.stages, busy, strict=True))
    ]
