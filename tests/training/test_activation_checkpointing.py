"""Every kind of activation checkpointing gives the losses of none, to the last bit, with dropout on."""

from pathlib import Path

import pytest
from support.programs import read_metrics
from support.training import RankTraining

SETTINGS = (
    "--train-iters 2 --batch-size 2 --global-batch-size 4 --attention-dropout 0.1 --hidden-dropout 0.1"
    " --clip-grad 0.4 --eval-iters 1 --eval-interval 2 --model-parallel-size 2"
).split()
ENGINES = {
    "plain": (2, ""),
    "sequence parallel": (2, "--sequence-parallel"),
    "pipeline": (4, "--pipe-parallel-size 2"),
    # The frozen embedding is the input of the first layer.
    "adapters": (1, "--model-parallel-size 1 --lora-rank 2 --position-embedding-type rope --hidden-dropout 0"),
}
KINDS = {
    "full": "--checkpoint-activations",
    "selective": "--recompute-granularity selective",
    "the activation of the MLP": "--recompute-mlp-activation",
    "in CPU memory": "--checkpoint-activations --partition-activations --checkpoint-in-cpu",
    "contiguous, synchronized and profiled": "--checkpoint-activations --partition-activations"
    " --contigious-checkpointing --synchronize-each-layer --profile-backward",
}


@pytest.fixture(scope="module")
def losses(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory):
    """Train with an engine and these flags: losses, validation losses and gradient norms."""

    def run(engine: str, flags: str) -> list[float]:
        processes, layout = ENGINES[engine]
        metrics: Path = tmp_path_factory.mktemp("kind") / "metrics"
        train_in_ranks(processes, *SETTINGS, *layout.split(), *flags.split(), "--metrics-file", metrics)
        names = ("lm_loss", "grad_norm", "validation_loss", "test_loss")
        return [line[name] for line in read_metrics(metrics) for name in names if name in line]

    return run


@pytest.fixture(scope="module")
def kept(losses) -> dict[str, list[float]]:
    """What each engine finds without checkpointing."""
    return {engine: losses(engine, "") for engine in ENGINES}


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("sequence parallel", "full"),
        ("sequence parallel", "selective"),
        ("plain", "the activation of the MLP"),
        ("plain", "in CPU memory"),
        ("adapters", "in CPU memory"),
        ("pipeline", "full"),
        ("pipeline", "contiguous, synchronized and profiled"),
    ],
)
def test_activation_checkpointing_keeps_losses(losses, kept, engine, kind) -> None:
    assert len(kept[engine]) == 2 + 2 + 1 + 1
    assert losses(engine, KINDS[kind]) == kept[engine]


def test_dropout_changes_losses(losses, kept) -> None:
    assert losses("plain", "--attention-dropout 0")[0] != kept["plain"][0]
