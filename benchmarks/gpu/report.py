"""The page about a machine with GPUs, made of what ``command.py`` has written into a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment

from benchmarks.gpu.machine import from_json
from megatron.common.errors import ConfigError, DataError, counted
from megatron.common.reading import read_json
from megatron.model.partition import TRACE
from megatron.tools.reporting.files import RECORD, read_record, read_series, read_timeline
from megatron.tools.reporting.page import KEYS, frame, sections

FORMAT = 1
RESULTS, PAGE = "gpu.json", "report.html"
_STYLE = """\
.passed { color: #2e7d32; } .failed { color: #b3261e; font-weight: bold; } .left { color: #767676; }
.bar { background: #5b9bd5; height: 0.8em; display: inline-block; } .bar.other { background: #bbb; }
"""
_DIFFERENCES = {name.replace("_", " "): name for name in ("layout", "loss", "grad_norm", "gradient", "weights")}
_DIFFERENCES["other weights"] = "other_weights"
_TEMPLATE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""\
{% macro bar(value, whole, kind="") %}
<span class='bar {{ kind }}' style='width: {{ (300 * value / whole) | round(1) if whole else 0 }}px'></span>
{% endmacro %}
{% macro checks(rows, columns) %}
<table><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}<th>result</th></tr>
{% for row in rows %}
<tr>{% for name in columns.values() %}<td>{{ cell(row.get(name)) }}</td>{% endfor %}
<td class='{{ "passed" if row.agrees else "failed" }}'>
{% if row.agrees is defined %}
{{ "agrees" if row.agrees else row.failure or "differs" ~ (", first in " ~ row.first if row.first else "") }}
{% endif %}</td></tr>
{% endfor %}
</table>
{% endmacro %}
<p>{{ summary }}</p>
<h2>Stages</h2>
<table>
{% for stage in content.stages %}
<tr><th>{{ stage.name }}</th><td class='{{ stage.status.split()[0] }}'>{{ stage.status }}</td>
<td class='number'>{{ "%.0f" | format(stage.seconds) }} s</td><td>{{ stage.reason or "" }}</td></tr>
{% endfor %}
</table>
{% if speeds %}
<h2>TFLOP/s of a training step</h2>
<p>Attention is counted in full; the peak is that of the device in bf16. Goals are for an H100 or H200.</p>
<table><tr><th>model</th><th></th><th class='number'>TFLOP/s</th><th class='number'>of the peak</th>
<th class='number'>goal</th><th></th></tr>
{% for row in speeds %}
<tr><td>{{ row.size }}</td><td>{{ row.way }}</td><td class='number'>{{ "%.1f" | format(row.tflops) }}</td>
<td class='number'>{{ percent(row.share) }}</td><td class='number'>{{ percent(row.goal) }}</td>
<td class='{{ "passed" if not row.goal or row.share >= row.goal else "failed" }}'>
{{ "" if not row.goal else "reached" if row.share >= row.goal else "missed" }}</td></tr>
{% endfor %}
</table>
{% endif %}
<h2>Machine</h2>
<table>
{% for name, value in machine.describe().items() %}
<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table>
{% if machine.nvidia_smi %}
<details><summary>nvidia-smi</summary><pre>{{ machine.nvidia_smi | join("\n") }}</pre></details>
{% endif %}
{% for stage in of("links") %}
<h2>{{ heading(stage.name) }}</h2>
<p>GB a second. Between GPUs it is the bus bandwidth of nccl-tests; copies run on all GPUs at once, the slowest
counts.</p>
<table><tr><th>size of the message</th>
{% for size, rows in stage.result.links | groupby("bytes") %}<th class='number'>{{ size // 1048576 }} MiB</th>
{% endfor %}</tr>
{% for name, rows in stage.result.links | groupby("operation") %}
<tr><td>{{ name }}</td>
{% for row in rows %}<td class='number'>{{ "%.4g" | format(row.bandwidth / 1e9) }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
{% if of("rehearsal") %}
<h2>One rank of large runs</h2>
<p>Computed on one GPU by tools/rehearse.py: in a step collectives return at once; the expected step adds them, by the
bandwidth that the planner knows of the device.</p>
<table><tr><th></th><th class='number'>step</th><th class='number'>launched in</th><th>phases</th>
<th class='number'>kernels</th><th class='number'>copies</th><th class='number'>waits</th><th class='number'>peak</th>
<th class='number'>expected step</th><th class='number'>MFU</th></tr>
{% for stage in of("rehearsal") %}
{% set rank, expected = stage.result.rehearsal.ranks[0], stage.result.rehearsal.expected %}
<tr><td>{{ stage.name }}</td><td class='number'>{{ ms(rank.seconds.wall) }}</td>
<td class='number'>{{ ms(rank.launched_seconds) }}</td>
<td>{% for name, one in rank.phases.items() %}{{ name }} {{ ms(one.wall) }}{{ ", " if not loop.last }}{% endfor %}</td>
<td class='number'>{{ rank.kernels }}</td><td class='number'>{{ rank.copies }}</td>
<td class='number'>{{ rank.host_waits }}</td>
<td class='number'>{{ "%.1f GB" | format(rank.memory_bytes.peak / 1e9) }}</td>
<td class='number'>{{ ms(expected.seconds) }}</td><td class='number'>{{ percent(expected.mfu) }}</td></tr>
{% endfor %}
</table>
{% endif %}
{% for stage in of("races") %}
<h2>Races</h2>
<p>Losses, gradients and weights with everything asynchronous delayed, against a run without delays, bit by bit.</p>
{{ checks(stage.result.races, {"run": "run", "ranks": "ranks"}) }}
{% endfor %}
{% for stage in of("kernels") %}
<h2>Kernels against plain torch</h2>
<p>Largest relative differences of outputs and gradients from plain torch in fp64.
{% set choices = stage.result.choices %}
Of {{ choices | length }} kinds of attention, {{ choices | selectattr("agrees") | list | length }} get the kernel that
is named at the start of a run{% for row in choices if not row.agrees %};
{{ row.what }}: {{ row.named }} is named, torch takes {{ row.found }}{% endfor %}.</p>
{{ checks(stage.result.kernels,
          {"kernel": "kernel", "precision": "dtype", "difference": "difference", "bound": "bound"}) }}
{% endfor %}
{% for stage in of("against_cpu") %}
<h2>GPU against CPU</h2>
<p>Largest relative differences from training on the CPU in fp32, with the same initial weights.
{% if stage.result.left_out %}No time was left for {{ stage.result.left_out }} runs.{% endif %}</p>
{{ checks(stage.result.against_cpu, {"model": "model", "precision": "dtype", "loss": "loss",
          "gradient norm": "grad_norm", "bound of the loss": "bound"}) }}
{% endfor %}
{% for stage in of("layouts") %}
<h2>{{ heading(stage.name) }}</h2>
<p>Largest differences from the first layout in {{ stage.result.layouts.iterations }} iterations, by
tools/verify_layout.py; the last row has the largest that are accepted.</p>
{{ checks(stage.result.layouts.layouts + [dict(stage.result.layouts.tolerances, layout="bound")],
          differences) }}
{% endfor %}
{% if of("rows") %}
<h2>Speed and memory of a step</h2>
<table><tr><th>this project</th><th>compared with</th><th class='number'>this project</th><th class='number'>other</th>
<th class='number'>ratio (min to max)</th><th></th></tr>
{% for stage in of("rows") %}
{% for row in stage.result.rows %}
<tr><td>{{ row.what }}</td><td>{{ row.peer }}</td><td class='number'>{{ row.ours }}</td>
<td class='number'>{{ row.theirs }}</td>
<td class='number'>{{ "%.2f" | format(row.ratio) }} ({{ row.spread }})</td>
<td>{{ bar(row.ratio, [row.ratio, 1] | max) }}<br>{{ bar(1, [row.ratio, 1] | max, "other") }}</td></tr>
{% endfor %}
{% endfor %}
</table>
{% endif %}
{% for stage in of("scaling") %}
<h2>{{ heading(stage.name) }}</h2>
<p>{{ stage.result.shape }}, on each GPU; 4 micro-batches a step for each GPU.</p>
<table><tr><th>layout</th><th class='number'>GPUs</th><th class='number'>tokens/s</th>
<th class='number'>tokens/s of each GPU</th><th class='number'>of one GPU's</th><th></th></tr>
{% set one = stage.result.scaling[0].tokens_per_second if stage.result.scaling else 0 %}
{% for row in stage.result.scaling %}
{% set each = row.tokens_per_second / row.devices %}
<tr><td>{{ row.layout }}</td><td class='number'>{{ row.devices }}</td>
<td class='number'>{{ "{:,.0f}".format(row.tokens_per_second) }}</td>
<td class='number'>{{ "{:,.0f}".format(each) }}</td><td class='number'>{{ "{:.0%}".format(each / one) }}</td>
<td>{{ bar(each, one) }}</td></tr>
{% endfor %}
</table>
{% endfor %}
{% for stage in of("profile") %}
{% set found = stage.result.profile %}
<h2>{{ heading(stage.name) }}</h2>
<p>{{ stage.result.shape }}: {{ "%.4g" | format(found.seconds) }} s without the profiler;
{{ "the GPU computed for" if found.on_device else "no kernels of the GPU were recorded; operators on the CPU took" }}
{{ "%.4g" | format(found.busy) }} s ({{ "{:.0%}".format(found.busy / found.seconds) }}).
The whole profile is in {{ stage.result.trace }}: open it in <code>https://ui.perfetto.dev</code>.</p>
<table>
{% for kind, seconds in found.kinds.items() %}
<tr><td>{{ kind }}</td><td class='number'>{{ "%.3g" | format(1000 * seconds) }} ms</td>
<td>{{ bar(seconds, found.busy) }}</td></tr>
{% endfor %}
</table>
<details><summary>the longest kernels</summary>
<table><tr><th>kernel</th><th class='number'>calls</th><th class='number'>ms</th></tr>
{% for kernel in found.longest %}
<tr><td>{{ kernel.name[:120] }}</td><td class='number'>{{ kernel.calls }}</td>
<td class='number'>{{ "%.3g" | format(1000 * kernel.seconds) }}</td></tr>
{% endfor %}
</table></details>
{% endfor %}
{% for stage in of("run") %}
<h1>{{ heading(stage.name) }}</h1>
<p>{{ stage.result.shape }}</p>
{{ run_sections(stage.result.run) | safe }}
{% endfor %}
""")


def read_results(folder: Path) -> dict[str, Any]:
    """What a check has written into ``folder``. Raises ConfigError if it is something else."""
    file = folder / RESULTS
    try:
        content = read_json(file)
        if content["format"] != FORMAT:
            raise ValueError
        from_json(content["machine"])
        if not all({"name", "status", "seconds", "reason", "result"} <= stage.keys() for stage in content["stages"]):
            raise ValueError
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); name a folder of benchmarks/gpu.sh") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: not what benchmarks/gpu.sh writes; name a folder of it") from error
    return content


def render(content: Mapping[str, Any], folder: Path) -> str:
    """The page about ``content``; the files of its training run are in ``folder``."""
    machine = from_json(content["machine"])

    def of(kind: str) -> list[Mapping[str, Any]]:
        return [stage for stage in content["stages"] if kind in stage["result"]]

    def run_sections(name: str) -> str:
        return _run_sections(folder / name)

    title = f"{machine.devices[0].name}, {content['created']}"
    speeds = {(row["size"], row["way"]): row for stage in of("speeds") for row in stage["result"]["speeds"]}
    body = _TEMPLATE.render(
        content=content, machine=machine, of=of, run_sections=run_sections, summary=summary(content), cell=_cell,
        heading=_heading, differences=_DIFFERENCES, percent=_percent, speeds=speeds.values(), ms=_ms,
    )  # fmt: skip
    return frame(title, body, _STYLE)


def summary(content: Mapping[str, Any]) -> str:
    """How many stages passed, and which failed."""
    stages = content["stages"]
    failed = [stage["name"] for stage in stages if stage["status"] == "failed"]
    count = {status: sum(stage["status"] == status for stage in stages) for status in ("passed", "left out")}
    text = f"{counted(count['passed'], 'stage')} of {len(stages)} passed"
    text += f", {count['left out']} left out" if count["left out"] else ""
    return text + (f"; failed: {', '.join(failed)}" if failed else "")


def _run_sections(folder: Path) -> str:
    try:
        trace, record = folder / TRACE, folder / RECORD
        return sections(
            read_series(folder / "metrics.jsonl", KEYS),
            read_record(record) if record.exists() else None,
            read_timeline(trace) if trace.exists() else None,
        )
    except (ConfigError, DataError) as error:
        return f"<p class='missing'>The run cannot be shown: {error.messages[0]}</p>"


def _heading(name: str) -> str:
    return name[:1].upper() + name[1:]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.4g} ms"


def _cell(value: float | str | None) -> str:
    return "-" if value is None else f"{value:.1e}" if isinstance(value, float) else str(value)
