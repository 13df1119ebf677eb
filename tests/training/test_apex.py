"""--fused-kernels auto where apex is installed: only Adam becomes apex's, and its state goes over and back."""

import json
from pathlib import Path

import pytest
from support.programs import TINY_MODEL, read_metrics

WORDS = "--batch-size 2 --eval-iters 0 --lr-decay-style constant --lr-decay-iters 4 --lr 0.01 --warmup 0".split()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_run_continues_with_the_other_adam(run_ranks_once, programs, tmp_path: Path, stage: int) -> None:
    words = [*map(str, (*TINY_MODEL, *programs.data_arguments)), *WORDS, "--zero-stage", str(stage)]
    (outputs,) = run_ranks_once(1, _over_and_back, words, str(tmp_path))
    whole, torch_first, apex_first = ([line["lm_loss"] for line in read_metrics(tmp_path / n)] for n in "wta")
    assert len(whole) == 4
    assert torch_first == pytest.approx(whole, rel=1e-5) and apex_first == pytest.approx(whole, rel=1e-5)
    are_of_apex = ["> optimizer apex FusedAdam; layer norm of torch" in text for text in outputs]
    assert are_of_apex == [False, False, True, True, False]
    assert "its state is converted from that of torch AdamW" in outputs[2]
    assert "its state is converted from that of apex FusedAdam" in outputs[4]
    description = json.loads((tmp_path / "a-checkpoints" / "global_step2" / "run.json").read_text())
    assert description["optimizer"] == "apex FusedAdam"


def _over_and_back(words: list[str], folder: str) -> list[str]:
    """Four iterations with torch's Adam; two with it, then two with apex's; two with apex's, then two with torch's."""
    from support import apex_stub
    from support.training import pretrain

    apex_stub.install(auto=True)

    def run(kernels: str, iterations: int, name: str) -> str:
        places = ["--save", f"{folder}/{name}-checkpoints", "--auto-resume", "--metrics-file", f"{folder}/{name}"]
        code, output = pretrain([*words, *places, "--fused-kernels", kernels, "--train-iters", str(iterations)])
        assert code == 0
        return output

    return [
        run("torch", 4, "w"), run("torch", 2, "t"), run("auto", 4, "t"), run("auto", 2, "a"), run("torch", 4, "a")
    ]  # fmt: skip
