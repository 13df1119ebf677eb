"""From a layout that differs from one process to the smallest that does, and to what computes the first difference.

A layout is smaller if it has fewer ranks, or as many along fewer axes. Each is trained up to the first iteration that
differs, which is recorded.
"""

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from megatron.common.errors import LaunchError
from megatron.model.spec import ParameterSpec, architecture_of
from megatron.tools.verify.compare import Bounds, Differences, Result, gradient_differences
from megatron.tools.verify.locate import Finding, collectives, first_rerouted, locate, what_copies_say
from megatron.tools.verify.request import (
    ONE_PROCESS,
    ONE_PROCESS_WITH_ZERO,
    Layout,
    Request,
    is_supported,
    reference_of,
)
from megatron.tools.verify.results import Comparison, LayoutResult
from megatron.tools.verify.runs import Trainer
from megatron.tools.verify.shards import Recording

_MOST_RUNS = 24
"""Of smaller layouts; then the layout that differs is located itself."""


@dataclass(frozen=True)
class Bisection:
    """The smallest layout that differs as a layout does, and where."""

    layout: Layout
    smallest: Layout
    iteration: int
    finding: Finding
    runs: int
    """Layouts that were trained for it."""

    def __str__(self) -> str:
        small, found = self.smallest, self.finding
        lines = [
            f"{self.layout.name} differs. The smallest layout that does is {small.name} "
            f"({small.processes} processes), in iteration {self.iteration}:",
            f"    first tensor  {found.tensor}",
            f"    computed by   {found.operation}",
        ]
        lines += [f"    its values    {found.cause}"] if found.cause else []
        calls = [f"{count} x {call}" for call, count in found.collectives.items()] or ["none"]
        return "\n".join([*lines, f"    collectives   {', '.join(calls)}"])


class Trained(NamedTuple):
    """What a layout computes, and the recording of its last iteration."""

    result: Result
    recording: Recording


@dataclass
class Bisector:
    """Compares layouts with one process, and records what they compute."""

    request: Request
    bounds: Bounds
    time_limit: float
    references: dict[int, Trained] = field(default_factory=dict)
    """One process, by the iterations that it was trained."""
    rounded: set[Layout] = field(default_factory=set)
    """Layouts that agree in fp32, and differ in half precision since rounding chooses other experts for some tokens."""

    def __post_init__(self) -> None:
        of_one = (one for one in (ONE_PROCESS, ONE_PROCESS_WITH_ZERO) if is_supported(self.request, one))
        self.base = next(of_one, None)

    def differences(self, layout: Layout) -> Differences:
        """The differences of ``layout`` from one process. Raises LaunchError if a run fails."""
        iterations = self.request.iterations
        return self._compare(self._reference(iterations), self._train(layout, iterations))

    def _compare(self, reference: Trained, other: Trained) -> Differences:
        assert self.base is not None
        return self._comparison.compare(self.base, reference.result, other.result)

    @cached_property
    def _comparison(self) -> Comparison:
        return Comparison(self.request, self.bounds, self.time_limit)

    def bisect(self, layout: Layout, iteration: int) -> Bisection | None:
        """Where ``layout``, which differs first in ``iteration``, goes wrong; None if it agrees when trained again."""
        candidates = [*itertools.islice(smaller_layouts(self.request, layout), _MOST_RUNS), layout]
        for runs, small in enumerate(candidates, 1):
            try:
                finding = self.finding(small, iteration)
            except LaunchError:
                if small is layout:
                    raise
                continue
            if finding is not None:
                return Bisection(layout, small, iteration, finding, runs)
        return None

    def finding(self, layout: Layout, iteration: int, *, locates: bool = False) -> Finding | None:
        """Where ``layout`` first differs, up to ``iteration``; None if it agrees. Raises LaunchError if a run fails.

        With ``locates`` the recordings are compared, too, if everything else agrees.
        """
        reference, trained = self._reference(iteration), self._train(layout, iteration)
        differences = self._compare(reference, trained)
        if differences.agree and not locates:
            return None
        (of_one,) = reference.recording.ranks
        if differences.kind != "initial weights":
            if finding := locate(of_one, trained.recording, self.bounds.gradient):
                return finding
        if differences.agree:
            return None
        if self._is_half and first_rerouted(of_one, trained.recording) is not None:
            finding = self._in_fp32.finding(layout, iteration)
            self.rounded |= {layout} if finding is None else set()
            return finding
        config = self.request.run(layout).model
        specs = architecture_of(config).named_parameters(config)
        finding = _finding_of_step(reference.result, trained.result, differences, self.bounds, layout, specs)
        return replace(finding, collectives=collectives(trained.recording, "iteration", is_backward=False))

    @property
    def _is_half(self) -> bool:
        return not {"--bf16", "--fp16"}.isdisjoint(self.request.words)

    @cached_property
    def _in_fp32(self) -> "Bisector":
        words = tuple(word for word in self.request.words if word not in ("--bf16", "--fp16"))
        request = replace(self.request, words=words)
        return Bisector(request, Bounds.of("fp32"), self.time_limit)

    def _reference(self, iterations: int) -> Trained:
        assert self.base is not None
        if iterations not in self.references:
            self.references[iterations] = self._train(self.base, iterations)
        return self.references[iterations]

    def _train(self, layout: Layout, iterations: int) -> Trained:
        trainer = Trainer(self.request, self.request.run(layout), self.time_limit)
        with tempfile.TemporaryDirectory(prefix="verify_layout.", ignore_cleanup_errors=True) as folder:
            result, failure = trainer.train(layout, iterations, ("record_run", folder, iterations))
            if result is None:
                raise LaunchError(f"layout {layout.name} failed: {failure}")
            return Trained(result, Recording(Path(folder)))


def bisections(bisector: Bisector, results: Sequence[LayoutResult]) -> Iterator[Bisection | str]:
    """Of each of the ``results`` that differs, its bisection, or why there is none; of those with few ranks first."""
    if bisector.base is None:
        yield "one process does not support this run: nothing to bisect with"
        return
    differing = [result for result in results if result.differences is not None and not result.agrees]
    if results[0].layout.processes > 1:  # it may itself be the one that is wrong
        differing.append(results[0])
    found: list[Bisection] = []
    for result in sorted(differing, key=lambda one: one.layout.processes):
        layout = result.layout
        if reference_of(replace(bisector.request, first=bisector.base), layout) != bisector.base:
            yield f"{layout.name} is not comparable with one process, whose global_aux_loss is another"
            continue
        known = next((one for one in found if is_within(one.smallest, layout)), None)
        if known is not None:
            yield f"{layout.name} is larger than {known.smallest.name}, which differs"
            continue
        try:
            differences = bisector.differences(layout) if results[0].layout.processes > 1 else result.differences
            assert differences is not None
            bisection = None if differences.agree else bisector.bisect(layout, differences.iteration)
        except LaunchError as error:
            yield str(error)
            continue
        if bisection is None:
            is_rounded = layout in bisector.rounded
            why = " in fp32: rounding chooses other experts for some tokens" if is_rounded else ""
            yield f"{layout.name} agrees with one process{why}"
        else:
            found.append(bisection)
            yield bisection


def is_within(small: Layout, layout: Layout) -> bool:
    """Whether each axis and option of ``small`` is one of ``layout``, too."""
    return small in _parts_of(layout)


def smaller_layouts(request: Request, layout: Layout) -> Iterator[Layout]:
    """The supported layouts with some of the axes and options of ``layout``, those of fewest ranks first."""
    of_one = (ONE_PROCESS, ONE_PROCESS_WITH_ZERO)
    parts = [one for one in _parts_of(layout) if one not in (layout, *of_one) and one.processes <= layout.processes]
    yield from (one for one in sorted(parts, key=_size) if is_supported(request, one))


def _size(layout: Layout) -> tuple[int, int]:
    defaults = vars(ONE_PROCESS)
    return layout.processes, sum(value != defaults[name] for name, value in vars(layout).items())


def _parts_of(layout: Layout) -> list[Layout]:
    choices = {
        name: list(dict.fromkeys([vars(ONE_PROCESS)[name], *_smaller(name, value), value]))
        for name, value in vars(layout).items()
    }
    layouts = (Layout(**dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values()))
    return [one for one in layouts if (one.virtual_stages > 1) == (one.schedule == "interleaved")]


def _smaller(name: str, value: object) -> list[int]:
    """2, if ``value`` is a larger size that it divides."""
    is_size = name not in ("zero", "virtual_stages") and isinstance(value, int) and value > 2 and value % 2 == 0
    return [2] if is_size else []


def _finding_of_step(
    reference: Result,
    other: Result,
    differences: Differences,
    bounds: Bounds,
    layout: Layout,
    specs: Mapping[str, ParameterSpec],
) -> Finding:
    """The first difference if all that modules compute agrees: in the gradients of weights, or in the step."""
    first = str(differences.first)
    operations = {
        "initial weights": f"drawing or sharding the weights of {_module_of(first.removeprefix('initial '))}",
        "loss": "the mean of the loss over micro-batches and ranks",
        "norm": "the gradient norm: the weights that it counts, and its sums over ranks",
        "step": "the optimizer step: clipping, learning rate, and the weights that ranks exchange",
    }
    if differences.kind != "gradient":
        return Finding(first, operations.get(differences.kind, ""))
    found = gradient_differences(reference, other, bounds, differences.noise)
    differing = [name for name in reversed(found) if not found[name] <= bounds.gradient]
    name = differing[0]
    cause = what_copies_say(other.gradients.get(name, ()), reference.gradients[name][0])
    return Finding(first, _gradient_operation(differing, found, layout, specs), cause)


def _gradient_operation(
    differing: Sequence[str], every: Mapping[str, float], layout: Layout, specs: Mapping[str, ParameterSpec]
) -> str:
    """What combines the gradients of exactly the parameters that differ."""
    replicas = layout.data * layout.context * layout.ulysses
    if replicas > 1 and len(differing) > 0.9 * len(every):
        return "the reduction of gradients over the data-parallel ranks"
    if layout.pipe > 1 and all(name.startswith("tied_modules.") for name in differing):
        return "the sum of the gradients of tied weights over the stages"
    if layout.experts > 1 and all(specs[name].is_expert for name in differing):
        return "the reduction of the gradients of experts over the ranks with the same experts"
    module = _module_of(differing[0])
    if layout.sequence_parallel and all(specs[name].shard_dim is None for name in differing):
        return f"the sum of the gradients of replicated weights over the tensor-parallel ranks, first of {module}"
    return f"the gradients of the weights of {module}"


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
