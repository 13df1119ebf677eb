"""--fused-kernels auto where apex is installed: only Adam becomes apex's, and its state goes over and back.

Also the interface: what the tests use instead of apex has apex's signatures, and all calls fit them.
"""

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.apex_stub.signatures import SIGNATURES
from support.programs import TINY_MODEL, read_metrics

ROOT = Path(__file__).parents[2]
Call = tuple[str, int, list[str]]
"""Name of a function of apex, number of positional arguments, names of the others."""

WORDS = "--batch-size 2 --eval-iters 0 --lr-decay-style constant --lr-decay-iters 4 --lr 0.01 --warmup 0".split()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_run_continues_with_the_other_adam(run_ranks_once, programs, tmp_path: Path, stage: int) -> None:
    words = [*map(str, (*TINY_MODEL, *programs.data_arguments)), *WORDS, "--zero-stage", str(stage)]
    (outputs,) = run_ranks_once(1, _over_and_back, words, str(tmp_path))
    whole, torch_first, apex_first = ([line["lm_loss"] for line in read_metrics(tmp_path / n)] for n in "wta")
    assert len(whole) == 4
    assert torch_first == pytest.approx(whole, rel=1e-5) and apex_first == pytest.approx(whole, rel=1e-5)
    assert ["> optimizer apex FusedAdam; layer norm of torch" in text for text in outputs] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert "its state is converted from that of torch AdamW" in outputs[2]
    assert "its state is converted from that of apex FusedAdam" in outputs[4]
    assert (
        json.loads((tmp_path / "a-checkpoints" / "global_step2" / "run.json").read_text())["optimizer"]
        == "apex FusedAdam"
    )


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


def test_another_optimizer_of_the_json_is_not_replaced(run_ranks_once, programs, tmp_path: Path) -> None:
    config = tmp_path / "sgd.json"
    config.write_text('{"optimizer": {"type": "SGD"}}')
    words = [
        *map(str, (*TINY_MODEL, *programs.data_arguments)),
        *"--batch-size 2 --eval-iters 0 --train-iters 1".split(),
    ]
    (output,) = run_ranks_once(1, _with_apex, [*words, "--deepspeed_config", str(config)])
    assert "> optimizer torch SGD; " in output


def _with_apex(words: list[str]) -> str:
    from support import apex_stub
    from support.training import pretrain

    apex_stub.install(auto=True)
    code, output = pretrain(words)
    assert code == 0
    return output


def test_all_that_is_imported_from_apex_has_known_signatures() -> None:
    known = {name.rpartition(".")[0] for name in SIGNATURES}
    assert set(_imported_from_apex()) == known


def _imported_from_apex() -> Iterator[str]:
    """``optimizers.FusedAdam`` for ``from apex.optimizers import FusedAdam`` anywhere in the package."""
    for file in (ROOT / "megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert all(alias.name.partition(".")[0] != "apex" for alias in node.names), f"{file}: from apex import"
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "apex":
                yield from (f"{node.module}.{alias.name}".removeprefix("apex.") for alias in node.names)


def test_the_stub_and_all_calls_fit_the_signatures_of_apex(run_ranks_once, programs) -> None:
    """Calls of short runs by this project and by DeepSpeed, with all norms, at ZeRO 0 and 1."""
    words = [*map(str, (*TINY_MODEL, *programs.data_arguments)), *WORDS, "--train-iters", "2"]
    ((stub, calls),) = run_ranks_once(1, _recorded, words)
    assert stub == {name: str(_signature([*versions.values()][-1])) for name, versions in SIGNATURES.items()}
    # DeepSpeed 0.19.8 removes the gradients by itself in these runs.
    assert {name for name, *_ in calls} >= SIGNATURES.keys() - {"optimizers.FusedAdam.zero_grad"}
    for name, positional, names in calls:
        for version, text in SIGNATURES[name].items():
            try:
                _signature(text).bind(*range(positional), **dict.fromkeys(names))
            except TypeError as error:
                pytest.fail(f"{name} of apex {version}: {error}")


def _signature(text: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {text[1:-1]}: None"))


def _recorded(words: list[str]) -> tuple[dict[str, str], list[Call]]:
    """The stub's signatures, and the different calls of runs with apex's Adam and all of its norms."""
    from support import apex_stub
    from support.training import pretrain

    from megatron.engines import optimizers
    from megatron.ops import apex as apex_variants

    apex_stub.install()
    optimizers.uses_apex = apex_variants.uses_apex = lambda fused_kernels: fused_kernels == "auto"
    import apex

    stub, calls = {}, set()
    for name in SIGNATURES:
        module, class_name, method = name.split(".")
        owner = getattr(getattr(apex, module), class_name)
        stub[name] = str(inspect.signature(getattr(owner, method)))
        setattr(owner, method, _recording(getattr(owner, method), name, calls))
    for flags in ("", "--zero-stage 1 --bf16 --fp32-residual-connection"):
        for norm in ("LayerNorm", "RMSNorm"):
            code, output = pretrain([*words, *flags.split(), "--normalization", norm])
            assert code == 0, output
    return stub, [(name, positional, list(names)) for name, positional, names in calls]


def _recording(function, name: str, calls: set):
    def recorded(*arguments, **named):
        calls.add((name, len(arguments), tuple(named)))
        return function(*arguments, **named)

    return recorded
