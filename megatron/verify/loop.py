"""Run layout after layout, each beside the first."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.config import ParallelConfig
from megatron.errors import CheckpointError
from megatron.launch.environment import prepare_environment
from megatron.mpu.layout import ParallelLayout, distributed
from megatron.verify.comparing import Result, Tolerances, compare, read_result
from megatron.verify.names import Layout
from megatron.verify.report import Verdict
from megatron.verify.request import Request
from megatron.verify.running import train


def verdicts(
    request: Request, layouts: Sequence[Layout], tolerances: Tolerances, time_limit: float
) -> Iterator[Verdict]:
    """What comes of each layout, as soon as it is known. Where the first fails there is nothing to compare with."""
    prepare_environment(os.environ)  # the runs take theirs from the request
    reference: Result | None = None
    with distributed(ParallelConfig()) as whole, tempfile.TemporaryDirectory(prefix="verify_layout.") as root:
        for layout in layouts:
            folder = Path(root) / layout.name
            seconds, failure = train(request, layout, folder, time_limit)
            result = None
            if failure is None:
                result, failure = _result(folder, whole)
            if reference is None:
                reference = result
            yield _verdict(layout, seconds, reference, result, failure, tolerances)
            if reference is None:
                return
            shutil.rmtree(folder, ignore_errors=True)


def _result(folder: Path, whole: ParallelLayout) -> tuple[Result | None, str | None]:
    try:
        return read_result(folder, whole), None
    except CheckpointError as error:
        return None, str(error)


def _verdict(
    layout: Layout,
    seconds: float,
    reference: Result | None,
    result: Result | None,
    failure: str | None,
    tolerances: Tolerances,
) -> Verdict:
    if reference is None or result is None:
        return Verdict(layout, seconds, None, agrees=False, failure=failure)
    differences = compare(reference, result, tolerances)
    return Verdict(layout, seconds, differences, differences.agree(tolerances))
