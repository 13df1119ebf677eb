"""The rules about what is read."""

from megatron.config import RunConfig
from megatron.config.blend import read_blend


def blends(run: RunConfig) -> str | None:
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            if words := getattr(run.data, name):
                read_blend(words)
        except ValueError as error:
            return f"--{name.replace('_', '-')} {' '.join(words)}: {error}"
    return None
