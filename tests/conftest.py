"""Shared fixtures: ranks that run a function together, and programs started as a user starts them."""

import gc
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import warm_hosts  # noqa: E402
from support.emulated_cuda import EmulatedCuda, OneGpu  # noqa: E402
from support.programs import Programs  # noqa: E402
from support.ranks import RankPools  # noqa: E402
from support.training import RankTraining, pretrain_bert, pretrain_in_blocks, pretrain_t5  # noqa: E402

from megatron.launch.environment import extensions_folder  # noqa: E402

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
# Extensions of the tests are compiled faster than those that users train with, and kept apart from them. Another
# checkout finds them: a compiler of another path would have them compiled again.
os.environ.update(CXX="g++", PATH=f"{ROOT / 'tests' / 'support' / 'compiler'}{os.pathsep}{os.environ['PATH']}")
os.environ["TORCH_EXTENSIONS_DIR"] = (
    f"{extensions_folder({**os.environ, 'TORCH_EXTENSIONS_DIR': ''}, sys.prefix)}-tests"
)
# Hundreds of processes import this checkout; none should have to compile it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Programs write as they do by default: with it an error that overtakes what was printed before would not be noticed.
os.environ.pop("PYTHONUNBUFFERED", None)
sys.dont_write_bytecode = False
# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(os, "sched_setscheduler"):
    # A thread that wakes up does not take the core from one that runs. Otherwise gloo's threads often take it from a
    # thread that holds the lock they want, and ask for that lock until their time is over: a tenth of the whole suite.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# What is imported and collected stays: looking through it again and again takes half of the time of collection.
gc.disable()
UMASK = os.umask(0o022)
os.umask(UMASK)


def pytest_collection_finish() -> None:
    """From here on there is something to collect, among what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``@pytest.mark.ranks(1, 2)``: the body of the test runs on one gloo rank, and then on two."""
    if mark := metafunc.definition.get_closest_marker("ranks"):
        metafunc.fixturenames.append("_ranks")
        metafunc.parametrize("_ranks", mark.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on its ranks, whose workers live on for the next."""
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    pools = pyfuncitem._request.getfixturevalue("_rank_pools")
    arguments = [pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters]
    pools.run(pyfuncitem.callspec.params["_ranks"], pyfuncitem.obj, *arguments)
    return True


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Programs that a test calls in this process change what holds for all that it creates and starts later."""
    environ = dict(os.environ)
    yield
    os.umask(UMASK)
    if os.environ != environ:
        os.environ.clear()
        os.environ.update(environ)


@pytest.fixture(scope="session")
def _rank_pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def run_ranks(_rank_pools: RankPools) -> Callable[..., list[Any]]:
    """``run_ranks(n, function, *args)``: call ``function(*args)`` on n gloo ranks; their results, in order.

    The workers live on for the next test. A rank that raises fails the test with its traceback; ranks
    that do not return in time fail it with the stack of each.
    """
    return _rank_pools.run


@pytest.fixture(scope="session")
def run_ranks_once(_rank_pools: RankPools) -> Callable[..., list[Any]]:
    """The same on ranks that exit afterwards: for functions that do not clean up groups, engines or settings."""
    return _rank_pools.run_once


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Start the project's programs the way a user does, with a small data set at hand."""
    return Programs(ROOT, tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the environment of DeepSpeed needs so that its launchers and ranks fork from a process that has torch."""
    if sys.platform != "linux" or os.geteuid() != 0:  # who alone may enter the namespaces of a host
        yield {}
        return
    folder = tmp_path_factory.mktemp("site")
    with warm_hosts.start(folder, folder / "log") as server:
        yield {"PYTHONPATH": str(folder)}
        server.kill()


@pytest.fixture(scope="session")
def train_in_ranks(_rank_pools: RankPools, programs: Programs) -> RankTraining:
    """Train with the tiny model on n gloo ranks, where many runs are compared."""
    return RankTraining(_rank_pools.run_once, programs.data_arguments)


@pytest.fixture(scope="session")
def train_in_blocks(_rank_pools: RankPools, programs: Programs) -> RankTraining:
    """The same with attention in a block for each document, as of long sequences."""
    return RankTraining(_rank_pools.run_once, programs.data_arguments, pretrain_in_blocks)


@pytest.fixture(scope="session")
def train_bert_in_ranks(_rank_pools: RankPools, programs: Programs) -> RankTraining:
    """The same with BERT, and a corpus of sentences."""
    return RankTraining(_rank_pools.run_once, programs.sentence_arguments, pretrain_bert)


@pytest.fixture(scope="session")
def train_t5_in_ranks(_rank_pools: RankPools, programs: Programs) -> RankTraining:
    """The same with T5."""
    return RankTraining(_rank_pools.run_once, programs.sentence_arguments, pretrain_t5)


@pytest.fixture(scope="session")
def emulated_cuda(programs: Programs) -> Iterator[EmulatedCuda]:
    """Start the project's programs on CUDA devices that are emulated in host memory; on a GPU with TESTS_ON_GPU=1."""
    emulated = OneGpu(programs) if os.environ.get("TESTS_ON_GPU") == "1" else EmulatedCuda(programs)
    yield emulated
    emulated.close()
