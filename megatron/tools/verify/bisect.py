"""Reduces a layout that differs from one process to the smallest such layout, and locates the operation at fault.

A layout is smaller if it has fewer ranks, or as many ranks along fewer axes. Each smaller layout is trained up to the
first iteration that differs, and this iteration is recorded.
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
from megatron.tools.verify.locate import Finding, cause_from_copies, collectives, first_rerouted, locate
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
"""Limit of smaller layouts that are tried; after them, the difference is located in the original layout."""


@dataclass(frozen=True)
class Bisection:
    """The smallest layout with the fault of ``layout``, and where its computation first differs."""

    layout: Layout
    smallest: Layout
    iteration: int
    finding: Finding
    runs: int
    """Number of layouts trained in the search."""

    def __str__(self) -> str:
        small, finding = self.smallest, self.finding
        lines = [
            f"{self.layout.name} differs. The smallest layout that does is {small.name} "
            f"({small.processes} processes), in iteration {self.iteration}:",
            f"    first tensor  {finding.tensor}",
            f"    computed by   {finding.operation}",
        ]
        lines += [f"    its values    {finding.cause}"] if finding.cause else []
        calls = [f"{count} x {call}" for call, count in finding.collectives.items()] or ["none"]
        return "\n".join([*lines, f"    collectives   {', '.join(calls)}"])


class Trained(NamedTuple):
    """The results of training on a layout, and the recording of its last iteration."""

    result: Result
    recording: Recording


@dataclass
class Bisector:
    """Trains layouts, compares them with one process and locates their first difference."""

    request: Request
    bounds: Bounds
    time_limit: float
    references: dict[int, Trained] = field(default_factory=dict)
    """Runs of one process, by number of iterations."""
    rounded: set[Layout] = field(default_factory=set)
    """Layouts that agree in fp32, and differ in half precision since rounding routes some tokens to other experts."""

    def __post_init__(self) -> None:
        bases = (layout for layout in (ONE_PROCESS, ONE_PROCESS_WITH_ZERO) if is_supported(self.request, layout))
        self.base = next(bases, None)

    def differences(self, layout: Layout) -> Differences:
        """The differences between ``layout`` and one process. Raises LaunchError if a run fails."""
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
        (reference_rank,) = reference.recording.ranks
        if differences.kind != "initial weights":
            if finding := locate(reference_rank, trained.recording, self.bounds.gradient):
                return finding
        if differences.agree:
            return None
        if self._is_half and first_rerouted(reference_rank, trained.recording) is not None:
            finding = self._in_fp32.finding(layout, iteration)
            self.rounded |= {layout} if finding is None else set()
            return finding
        config = self.request.run(layout).model
        specs = architecture_of(config).named_parameters(config)
        finding = _finding_of_step(reference.result, trained.result, differences, self.bounds, layout, specs)
        return replace(finding, collectives=collectives(trained.recording, "iteration", is_backward=False))

    @property
    def _is_half(self) -> bool:
        return not {"--bf16", "--fp16"}.isdisjoint(self.request.arguments)

    @cached_property
    def _in_fp32(self) -> "Bisector":
        arguments = tuple(argument for argument in self.request.arguments if argument not in ("--bf16", "--fp16"))
        request = replace(self.request, arguments=arguments)
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
    """The bisection of each of the ``results`` that differs, or why there is none; layouts with few ranks first."""
    if bisector.base is None:
        yield "one process does not support this run: nothing to bisect with"
        return
    differing = [result for result in results if result.differences is not None and not result.agrees]
    if results[0].layout.processes > 1:  # the reference may itself be wrong
        differing.append(results[0])
    completed: list[Bisection] = []
    for result in sorted(differing, key=lambda result: result.layout.processes):
        layout = result.layout
        if reference_of(replace(bisector.request, first=bisector.base), layout) != bisector.base:
            yield f"{layout.name} is not comparable with one process, where global_aux_loss has a different value"
            continue
        known = next((bisection for bisection in completed if is_within(bisection.smallest, layout)), None)
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
            completed.append(bisection)
            yield bisection


def is_within(small: Layout, layout: Layout) -> bool:
    """Whether ``layout`` has each axis and option of ``small``, or more."""
    return small in _parts_of(layout)


def smaller_layouts(request: Request, layout: Layout) -> Iterator[Layout]:
    """The supported layouts with some of the axes and options of ``layout``, in order of their number of ranks."""
    excluded = (layout, ONE_PROCESS, ONE_PROCESS_WITH_ZERO)
    parts = [part for part in _parts_of(layout) if part not in excluded and part.processes <= layout.processes]
    yield from (part for part in sorted(parts, key=_size) if is_supported(request, part))


def _size(layout: Layout) -> tuple[int, int]:
    defaults = vars(ONE_PROCESS)
    return layout.processes, sum(value != defaults[name] for name, value in vars(layout).items())


def _parts_of(layout: Layout) -> list[Layout]:
    choices = {
        name: list(dict.fromkeys([vars(ONE_PROCESS)[name], *_smaller(name, value), value]))
        for name, value in vars(layout).items()
    }
    layouts = (Layout(**dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values()))
    return [part for part in layouts if (part.virtual_stages > 1) == (part.schedule == "interleaved")]


def _smaller(name: str, value: object) -> list[int]:
    """Smaller sizes to try for an axis of size ``value``: 2, if it is larger and even."""
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
    """The first difference if the outputs of all modules agree: in the gradients of weights, or in the step."""
    first = str(differences.first)
    operations = {
        "initial weights": f"drawing or sharding the weights of {_module_of(first.removeprefix('initial '))}",
        "loss": "the mean of the loss over micro-batches and ranks",
        "norm": "the gradient norm: the weights that it counts, and its sums over ranks",
        "step": "the optimizer step: clipping, learning rate, and the weights that ranks exchange",
    }
    if differences.kind != "gradient":
        return Finding(first, operations.get(differences.kind, ""))
    by_parameter = gradient_differences(reference, other, bounds, differences.noise)
    differing = [name for name in reversed(by_parameter) if not by_parameter[name] <= bounds.gradient]
    name = differing[0]
    cause = cause_from_copies(other.gradients.get(name, ()), reference.gradients[name][0])
    return Finding(first, _gradient_operation(differing, by_parameter, layout, specs), cause)


def _gradient_operation(
    differing: Sequence[str], every: Mapping[str, float], layout: Layout, specs: Mapping[str, ParameterSpec]
) -> str:
    """The reduction whose parameters are exactly those that differ."""
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
