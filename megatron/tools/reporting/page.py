"""The report itself: one HTML page that holds all it shows, and opens without a network."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from statistics import median

from megatron.tools.reporting.curves import Chart, draw_chart
from megatron.tools.reporting.files import Points, Record
from megatron.tools.reporting.measure import PASSES, Measures, measure
from megatron.tools.reporting.schedule_picture import draw
from megatron.training.timeline import Timeline

KEYS = (
    "lm_loss", "validation_loss", "learning_rate", "grad_norm", "tokens_per_second", "seconds_per_iteration",
    "tflops_per_device", "memory_gb", "loss_scale", "skipped_iterations", "consumed_tokens",
)  # fmt: skip

_STYLE = """
body { font-family: Helvetica, Arial, sans-serif; color: #222; max-width: 1220px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.7em; margin-bottom: 0; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ccc; }
.charts { display: flex; flex-wrap: wrap; gap: 12px; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; }
th { color: #767676; font-weight: normal; } td.number, th.number { text-align: right; }
.missing { color: #767676; } pre { font-size: 0.85em; background: #f6f6f6; padding: 1em; overflow-x: auto; }
"""


def page(name: str, series: Mapping[str, Points], record: Record | None, timeline: Timeline | None) -> str:
    """The whole page about the run ``name``; it says what there is nothing to show of."""
    measures = measure(timeline) if timeline else None
    sections = [
        ("Result", _result(series)),
        ("Curves", _curves(series)),
        ("Layout", _pairs(record.description) if record else _missing("run.json", "--run-dir")),
        ("Plan against measurement", _plan(record, series, timeline, measures)),
        ("Schedule", [draw(timeline, measures)] if timeline and measures else _missing("trace", "--trace")),
        ("Environment", _pairs(record.environment) if record else _missing("run.json", "--run-dir")),
        ("Configuration", _config(record) if record else _missing("run.json", "--run-dir")),
    ]
    body = "\n".join(f"<h2>{title}</h2>\n" + "\n".join(parts) for title, parts in sections)
    return (
        f"<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n<title>{escape(name)}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(name)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _missing(what: str, flag: str) -> list[str]:
    return [f"<p class='missing'>No {what} of this run: train with {flag} to see it here.</p>"]


def _result(series: Mapping[str, Points]) -> Iterator[str]:
    rows = []
    for key, words in (("lm_loss", "training loss"), ("validation_loss", "validation loss")):
        for iteration, loss in list(series[key].items())[-1:]:
            rows.append((words, f"{loss:.4f} at iteration {iteration:,}"))
    if series["validation_loss"]:
        iteration, loss = min(series["validation_loss"].items(), key=lambda point: point[1])
        rows.append(("lowest validation loss", f"{loss:.4f} at iteration {iteration:,}"))
    for key, words, unit in (
        ("tokens_per_second", "throughput, median", "{:,.0f} tokens/s"),
        ("tflops_per_device", "on each device, median", "{:.4g} TFLOP/s"),
        ("seconds_per_iteration", "iteration, median", "{:.4g} s"),
    ):
        if series[key]:
            rows.append((words, unit.format(median(series[key].values()))))
    for key, words, unit in (
        ("memory_gb", "memory of rank 0, most", "{:.2f} GB"),
        ("consumed_tokens", "tokens", "{:,.0f}"),
        ("skipped_iterations", "iterations skipped", "{:.0f}"),
    ):
        if series[key]:
            rows.append((words, unit.format(max(series[key].values()))))
    return _pairs(dict(rows))


def _curves(series: Mapping[str, Points]) -> Iterator[str]:
    charts = [
        Chart("Loss", "nats per token", {"training": series["lm_loss"], "validation": series["validation_loss"]}),
        Chart("Learning rate", "", {"learning rate": series["learning_rate"]}, from_zero=True),
        Chart("Gradient norm", "before clipping", {"norm": series["grad_norm"]}, from_zero=True),
        Chart("Throughput", "tokens per second", {"throughput": series["tokens_per_second"]}, from_zero=True),
        Chart("Memory of rank 0", "GB", {"memory": series["memory_gb"]}, from_zero=True),
        Chart("Speed of each device", "TFLOP/s", {"speed": series["tflops_per_device"]}, from_zero=True),
    ]
    yield "<div class='charts'>"
    yield from map(draw_chart, charts)
    yield "</div>"


def _plan(
    record: Record | None, series: Mapping[str, Points], timeline: Timeline | None, measures: Measures | None
) -> Iterator[str]:
    """What was planned of an iteration, and what came of it."""
    if record is None:
        yield from _missing("run.json", "--run-dir")
        return
    rows = []
    times, held = series["seconds_per_iteration"].values(), series["memory_gb"].values()
    if times and record.seconds is not None:
        rows.append(("seconds of an iteration", f"{record.seconds:.4g}", f"{median(times):.4g}"))
    if held and record.stages:
        whole = ", all of the process" if record.environment.get("device") == "cpu" else ""
        rows.append(("memory of rank 0", f"{record.stages[0].memory / 1e9:.3g} GB", f"{max(held):.3g} GB{whole}"))
    if timeline and measures:
        if measures.theory is not None:
            rows.append(("bubble", f"{measures.theory:.1%}", f"{measures.bubble:.1%}"))
        rows += _shares(record, timeline, measures)
    yield from _table(("", "planned", "measured"), rows)


def _shares(record: Record, timeline: Timeline, measures: Measures) -> list[tuple[str, str, str]]:
    """What each stage does of all passes."""
    busy = [
        sum(measures.ranks[rank][share] for rank in stage for share in PASSES)
        for stage in zip(*timeline.pipelines, strict=True)
    ]
    if len(busy) != len(record.stages):
        return []  # the trace is of another layout
    return [
        (f"passes of stage {number}", f"{stage.share:.1%}", f"{seconds / max(sum(busy), 1e-12):.1%}")
        for number, (stage, seconds) in enumerate(zip(record.stages, busy, strict=True))
    ]


def _config(record: Record) -> list[str]:
    text = escape(json.dumps(record.config, indent=2))
    return [f"<details><summary>all settings, and the DeepSpeed config</summary><pre>{text}</pre></details>"]


def _pairs(rows: Mapping[str, str]) -> Iterator[str]:
    yield "<table>"
    for name, value in rows.items():
        yield f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
    yield "</table>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th class='number'>{escape(name)}</th>" for name in head) + "</tr>"
    for first, *others in rows:
        yield (
            f"<tr><th>{escape(first)}</th>" + "".join(f"<td class='number'>{escape(c)}</td>" for c in others) + "</tr>"
        )
    yield "</table>"
