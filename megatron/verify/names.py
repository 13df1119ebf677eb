"""Layouts by name, such as ``tp2-pp2-dp2-zero1-sp``. No torch here."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.errors import ConfigError

GRAMMAR = "tpA-ppB-dpC[-zeroZ][-sp][-ulyssesN][-dualpipev][-plain]"
_SIZES = ("tp", "pp", "dp", "zero", "ulysses")
_MARKS = ("sp", "dualpipev", "plain")
_PART = re.compile(rf"(?:({'|'.join(_SIZES)})(\d+))|({'|'.join(_MARKS)})")


@dataclass(frozen=True)
class Layout:
    """How ranks share the work. ``pipe`` 0 is the plain engine, 1 and more are stages of the pipeline engine."""

    tensor: int
    pipe: int
    data: int
    zero: int = 0
    sequence_parallel: bool = False
    ulysses: int = 1
    """DeepSpeed's own sequence parallelism."""
    dualpipev: bool = False

    @property
    def name(self) -> str:
        """The name that ``parse_layout`` reads."""
        parts = [f"tp{self.tensor}-pp{self.pipe}-dp{self.data}"]
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"ulysses{self.ulysses}"] if self.ulysses > 1 else []
        return "-".join(parts + (["dualpipev"] if self.dualpipev else []))

    @property
    def processes(self) -> int:
        """Ranks it takes."""
        return self.tensor * max(self.pipe, 1) * self.ulysses * self.data

    @property
    def flags(self) -> list[str]:
        """The words of a command line that ask for it, on so many processes."""
        words = f"--model-parallel-size {self.tensor} --pipe-parallel-size {self.pipe} --zero-stage {self.zero}".split()
        words += ["--sequence-parallel"] if self.sequence_parallel else []
        words += ["--ds-sequence-parallel-size", str(self.ulysses)] if self.ulysses > 1 else []
        return words + (["--pipeline-schedule", "dualpipev"] if self.dualpipev else [])


ONE_PROCESS = Layout(1, 0, 1)
ONE_PROCESS_WITH_ZERO = Layout(1, 0, 1, zero=1)
"""What half precision takes on one process, for the sake of its fp32 weights."""


def parse_layout(name: str) -> Layout:
    """The layout of that name. Raises ConfigError if it is none."""
    sizes: dict[str, int] = {}
    marks: set[str] = set()
    for part in name.split("-"):
        match = _PART.fullmatch(part)
        if match is None or match[1] in sizes or match[3] in marks:
            raise ConfigError(f"layout {name}: {part!r} is not understood there; write {GRAMMAR}")
        if match[1]:
            sizes[match[1]] = int(match[2])
        else:
            marks.add(match[3])
    if {"tp", "pp", "dp"} - sizes.keys() or 0 in (sizes["tp"], sizes["dp"], sizes.get("ulysses")):
        raise ConfigError(f"layout {name}: sizes of TP, PP and DP are needed; write {GRAMMAR}")
    if "plain" in marks and sizes["pp"] > 1:
        raise ConfigError(f"layout {name}: the plain engine has no stages; write pp0 or pp1 with plain")
    return Layout(
        tensor=sizes["tp"],
        pipe=0 if "plain" in marks else sizes["pp"],
        data=sizes["dp"],
        zero=sizes.get("zero", 0),
        sequence_parallel="sp" in marks,
        ulysses=sizes.get("ulysses", 1),
        dualpipev="dualpipev" in marks,
    )


def grids(processes: int) -> Iterator[Layout]:
    """Every grid of so many processes, on either engine, with every ZeRO stage and each mark, legal or not."""
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    marks = list(itertools.product(range(4), (False, True), (False, True)))
    for tensor, stages, ulysses in itertools.product(sizes, repeat=3):
        data, rest = divmod(processes, tensor * stages * ulysses)
        if rest:
            continue
        for pipe in (0, 1) if stages == 1 else (stages,):
            for zero, sequence, dualpipev in marks:
                yield Layout(tensor, pipe, data, zero, sequence, ulysses, dualpipev)
