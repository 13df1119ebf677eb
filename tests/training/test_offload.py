"""Offload to files: where libaio is, it trains as without; where it is not, it is refused with what to install."""

import pytest
from support.programs import Programs, read_metrics

SETTINGS = "--train-iters 3 --batch-size 2 --gas 2 --eval-iters 0 --zero-stage 3".split()


@pytest.fixture
def has_libaio(run_ranks) -> bool:
    return run_ranks(1, _has_libaio)[0]


def _has_libaio() -> bool:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False)


def test_nvme_without_libaio_is_refused(programs: Programs, tmp_path, has_libaio: bool) -> None:
    if has_libaio:
        pytest.skip("libaio is installed here")
    finished = programs.pretrain(1, *SETTINGS, "--offload-optimizer", "nvme", "--nvme-path", tmp_path)
    assert finished.returncode == 7
    assert "offload to nvme needs libaio, which is not found: install libaio-dev" in finished.output


@pytest.mark.parametrize("kinds", ["--offload-optimizer nvme", "--offload-optimizer nvme --offload-param nvme"])
def test_nvme_with_libaio_keeps_losses(programs: Programs, tmp_path, has_libaio: bool, kinds: str) -> None:
    if not has_libaio:
        pytest.skip("libaio is not installed here")
    flags = {"kept": [], "offloaded": [*kinds.split(), "--nvme-path", tmp_path]}
    losses = {}
    for name, words in flags.items():
        programs.pretrain(1, *SETTINGS, *words, "--metrics-file", tmp_path / name, time_limit=600).ok()
        losses[name] = [line["lm_loss"] for line in read_metrics(tmp_path / name)]
    assert losses["offloaded"] == pytest.approx(losses["kept"], rel=1e-4)


def test_nvme_folder_must_exist(programs: Programs, tmp_path) -> None:
    missing = tmp_path / "missing"
    finished = programs.pretrain(1, *SETTINGS, "--offload-param", "nvme", "--nvme-path", missing)
    assert finished.returncode == 2
    assert f"--nvme-path {missing}: no such folder; name one on the NVMe device" in finished.output
