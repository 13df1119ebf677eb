"""The torch that is installed is compared with those that are supported."""

import pytest

from megatron.common.errors import ConfigError
from megatron.launch import environment


@pytest.mark.parametrize(
    ("installed", "warns"),
    [
        ("2.10.0a0+b4e4ee81d3.nv25.12", False),
        ("2.12.0a0+5228986c39.nv26.05", False),
        ("2.15.1", False),
        ("3.0.0", True),
    ],
)
def test_a_supported_or_newer_version_runs(installed: str, warns: bool, monkeypatch, capsys) -> None:
    monkeypatch.setattr(environment, "version", lambda package: installed)
    environment.check_torch(is_main_rank=True)
    assert bool(capsys.readouterr().err) == warns


@pytest.mark.parametrize("installed", ["2.8.0a0+5228986c39.nv25.06", "2.9.1", "1.13.1"])
def test_an_older_version_ends_the_run(installed: str, monkeypatch) -> None:
    monkeypatch.setattr(environment, "version", lambda package: installed)
    with pytest.raises(ConfigError, match=installed.split("+")[0]):
        environment.check_torch(is_main_rank=True)
