"""Weights & Biases and MLflow: the settings and the metrics of a run, where flags request them.

Where they are sent to is set by the packages' own environment variables, such as WANDB_MODE and MLFLOW_TRACKING_URI.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from megatron.config import RunConfig
from megatron.launch.rank import print_warning
from megatron.training.callbacks import Callback


class Trackers(Callback):
    """Sends settings and metrics from rank 0; a package that fails is left out, with a warning."""

    def __init__(self) -> None:
        self._runs: dict[str, Any] = {}

    def on_run_start(self, run: RunConfig, device: str) -> None:
        """Start a run of each requested package."""
        settings = {f"{part}.{name}": _plain(value) for part, name, value in _settings(run)}
        if run.logging.wandb_project is not None:
            self._attempt("wandb", lambda: self._runs.update(wandb=_WandbRun(run, settings)))
        if run.logging.mlflow_experiment is not None:
            self._attempt("mlflow", lambda: self._runs.update(mlflow=_MlflowRun(run, settings)))

    def on_metrics(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of an iteration."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for package, tracked in list(self._runs.items()):
            self._attempt(package, partial(tracked.log, numbers, iteration))

    def on_run_end(self) -> None:
        """Wait until everything is sent."""
        for package, tracked in list(self._runs.items()):
            self._attempt(package, tracked.end)

    def _attempt(self, package: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # of any kind: a figure is not worth the run
            self._runs.pop(package, None)
            print_warning(f"{package} failed, continuing without: {' '.join(str(error).split())[:300]}")


class _WandbRun:
    def __init__(self, run: RunConfig, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=run.logging.wandb_project, name=run.logging.wandb_exp_name, config=dict(settings)
        )

    def log(self, numbers: dict[str, float], iteration: int) -> None:
        self._run.log(numbers, step=iteration)

    def end(self) -> None:
        self._run.finish()


class _MlflowRun:
    def __init__(self, run: RunConfig, settings: Mapping[str, Any]) -> None:
        import mlflow

        mlflow.set_experiment(run.logging.mlflow_experiment)
        self._library = mlflow
        mlflow.start_run()
        mlflow.log_params({name: value for name, value in settings.items() if value is not None})

    def log(self, numbers: dict[str, float], iteration: int) -> None:
        self._library.log_metrics(numbers, step=iteration)

    def end(self) -> None:
        self._library.end_run()


def _settings(run: RunConfig) -> list[tuple[str, str, Any]]:
    parts = {part: values for part, values in asdict(run).items() if isinstance(values, dict) and part != "ds_config"}
    return [(part, name, value) for part, values in parts.items() for name, value in values.items()]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float) else str(value)[:250]
