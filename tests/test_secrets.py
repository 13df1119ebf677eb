"""Environment variables are neither printed nor written to a file."""

from pathlib import Path

from support.programs import Programs

SECRET = "hunter2-hunter2"
SETTINGS = "--train-iters 2 --batch-size 2 --global-batch-size 4 --eval-iters 0 --verbose".split()


def test_environment_variables_are_not_disclosed(programs: Programs, tmp_path: Path) -> None:
    """Not the screen with --verbose, the metrics, TensorBoard's files or the checkpoint."""
    flags = ("--save", "--tensorboard-dir", "--metrics-file")
    places = [word for flag in flags for word in (flag, tmp_path / flag.strip("-"))]
    ended = programs.pretrain(1, *SETTINGS, *places, HF_TOKEN=SECRET, NCCL_SECRET=SECRET, DS_PASSWORD=SECRET).ok()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"metrics-file", "run.json", "manifest.json"} <= {path.name for path in written}
    assert SECRET not in ended.output
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
