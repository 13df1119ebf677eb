"""Decisions of an elastic run: which hosts, which layout, when it is over. Nothing is started."""

import importlib
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.programs import TINY_MODEL

from megatron.cli import parse_run
from megatron.common.errors import ConfigError, LaunchError
from megatron.launch.rank import EXIT_CODE_FOLDER, _write_exit_code
from megatron.tools.cluster import elastic_run, elastic_watch
from megatron.tools.cluster import supervise as supervision
from megatron.tools.cluster.doctor import HostState
from megatron.tools.cluster.elastic import (
    Start,
    StartResult,
    TooFewHostsError,
    failed_first,
    is_complete,
    pick_hosts,
    run_elastic,
    slow_hosts,
    with_ended,
    without_slow,
)
from megatron.tools.cluster.elastic_run import ElasticRun, planned_device
from megatron.tools.cluster.elastic_watch import Watch, connections
from megatron.tools.cluster.hostfile import Host, read_hostfile
from megatron.tools.cluster.launch_flags import read_launch
from megatron.tools.cluster.launching import launcher_arguments
from megatron.tools.cluster.supervise import FORWARDED, HELPER, PREEMPTED, code_after_signal, read_exit_codes
from megatron.tools.planning.machine import DEVICES
from megatron.tools.planning.survivors import arguments_at_world_size, plan_survivors

A, B, C = (Host(name, (0, 1)) for name in "abc")
ABC = Start([A, B, C], [], "")
SPARE, SMALL = Host("s", (0, 1, 2), spare=True), Host("t", (0,), spare=True)


def states(hosts: Sequence[Host], lost: str = "") -> list[HostState]:
    return [HostState(host, "ssh: no answer" if host.name in lost else None) for host in hosts]


@pytest.mark.parametrize(
    ("lost", "names", "complete"),
    [
        ("", "abc", True),
        ("b", "asc", True),  # in its place, so that the other hosts keep their ranks
        ("s", "abc", True),
        ("ab", "sct", False),  # the small one cannot take the place of a lost one, but helps where there is none
        ("abc", "st", False),
        ("bs", "act", False),
        ("abcst", "", False),
    ],
)
def test_spare_hosts_take_the_place_of_lost_ones(lost: str, names: str, complete: bool) -> None:
    hosts = pick_hosts([A, B, C], states([A, B, C, SPARE, SMALL], lost))
    assert "".join(host.name for host in hosts) == names
    assert is_complete([A, B, C], hosts) is complete
    assert all(len(host.slots) <= 2 for host in hosts if complete)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({0: "6", 1: "6", 2: "", 3: "6", 4: "6", 5: "6"}, {"b"}),
        ({0: "6", 1: "6", 4: "6", 5: "6"}, {"b"}),  # they did not even start
        ({0: "6", 1: "6", 2: "6", 3: "6", 4: "6", 5: "1"}, {"c"}),
        ({rank: "6" for rank in range(6)}, set()),
        ({}, set()),
    ],
)
def test_the_host_that_failed_first(codes: Mapping[int, str], expected: set[str]) -> None:
    assert failed_first(ABC, codes) == expected


def test_ranks_that_ran_when_they_were_ended_did_not_fail_first() -> None:
    """Unless those that have ended did so because of others: then one that ran hung."""
    running = {0: "", 1: "", 2: "", 3: "6", 4: "", 5: "6"}
    assert failed_first(ABC, with_ended(running, ABC, {"b"})) == {"b"}
    waiting = {0: "", 1: "", 2: "6", 3: "6", 4: "6", 5: "6"}
    assert failed_first(ABC, with_ended(waiting, ABC, {"b", "c"})) == {"a"}


def limits(min_hosts: int, exclude_after: int, max_restarts: int) -> SimpleNamespace:
    return SimpleNamespace(min_hosts=min_hosts, exclude_after=exclude_after, max_restarts=max_restarts)


def elastic(
    ends: Sequence[StartResult], checkpoints: Sequence[str], launch: SimpleNamespace, lost: Sequence[str] = ("",) * 9
) -> tuple[int, list[str]]:
    """The exit code, and the hosts of each start; a health check finds the next of ``lost``."""
    left, seen, looks, started = iter(ends), iter(checkpoints), iter(lost), []

    def run(start: Start) -> StartResult:
        started.append("".join(host.name for host in start.hosts))
        return next(left)

    def check_hosts(excluded: Mapping[str, str]) -> list[HostState]:
        return [state for state in states([A, B, C], next(looks)) if state.host.name not in excluded]

    def choose(found: Sequence[HostState]) -> Start:
        return Start(pick_hosts([A, B, C], found), [], "")

    parts = SimpleNamespace(check_hosts=check_hosts, choose=choose, start=run, progress=lambda: next(seen))
    parts.launch, parts.takes_snapshots = launch, True
    code = run_elastic(parts)
    assert next(left, None) is None
    return code, started


LOST, KILLED, DONE = StartResult(255, False, frozenset("b")), StartResult(137, False), StartResult(0, False)
BACK, OF_C = StartResult(137, False, to_rejoin=True), StartResult(1, False, frozenset("c"))
SAME = ["5"] * 9
RUNS = [
    (
        [LOST, BACK, DONE],
        ["", "5", "7", "9"],
        (2, 3, 1),
        ["", "b", "", ""],
        0,
        "abc ac abc",
        "without b (ssh: no answer",
    ),
    # The loss of a host is no crash loop, even if no rank has left an exit code, so that no host is to blame.
    ([KILLED, KILLED, KILLED, DONE], SAME, (1, 3, 9), ["", "b", "a", "b"], 0, "abc ac bc ac", ""),
    ([KILLED] * 3, SAME, (1, 3, 9), [""] * 9, 93, "abc abc abc", "no host was in all of them; not restarted"),
    (
        [LOST, LOST, StartResult(1, False, frozenset("bc")), DONE],
        *(SAME, (2, 3, 9), [""] * 9, 0, "abc abc abc ac"),
        "3 failures in a row without a new checkpoint, b in all of them: left out",
    ),
    ([LOST] * 3, SAME, (3, 3, 9), [""] * 9, 93, "abc abc abc", "b in all of them, and too few without; not restarted"),
    ([LOST, OF_C, LOST], SAME, (1, 3, 9), [""] * 9, 93, "abc abc abc", "no host was in all of them; not restarted"),
    *(([StartResult(code, False)], SAME, (1, 3, 9), [""] * 9, code, "abc", "") for code in (0, 2, 75)),
    ([StartResult(1, by_signal=True)], SAME, (1, 3, 9), [""] * 9, 1, "abc", ""),
    ([StartResult(75, by_signal=True, to_rejoin=True)], SAME, (1, 3, 9), [""] * 9, 75, "abc", ""),
]
"""Ends and newest checkpoints; --min-hosts, --exclude-after and --max-restarts; hosts that each health check misses;
exit code, the hosts of each start, and what is said."""


@pytest.mark.parametrize(("ends", "checkpoints", "numbers", "lost", "code", "starts", "text"), RUNS)
def test_starts_and_ends(ends, checkpoints, numbers, lost, code, starts, text, capsys) -> None:
    assert elastic(ends, checkpoints, limits(*numbers), lost) == (code, starts.split())
    assert text in capsys.readouterr().err


def test_a_start_is_a_line(capsys) -> None:
    elastic([LOST, DONE], ["", "5", "7"], limits(2, 3, 1), ["", "b"])
    lines = capsys.readouterr().err.splitlines()
    assert "4 ranks on a c, without b (ssh: no answer): ; resuming from 5, unless the hosts have a newer" in lines[-1]
    assert len(lines) == 3


def test_no_start_below_the_least_number_of_hosts() -> None:
    message = "1 host can take part, fewer than --min-hosts 2: without a .*; without b"
    with pytest.raises(LaunchError, match=message) as caught:
        elastic([LOST], ["", "5"], limits(2, 3, 9), ["", "ab"])
    assert caught.value.exit_code == 6


def test_slow_hosts_are_left_out_while_enough_are_left(tmp_path: Path) -> None:
    file = tmp_path / "stragglers.json"
    assert slow_hosts(file, ABC) == set()
    file.write_text('{"hosts": {"node7": 0.5}, "ranks": [2, 3, 9]}')  # by rank: a host may call itself otherwise
    assert slow_hosts(file, ABC) == {"b"}
    for wrong in ("[1]", '{"ranks": 3}', '{"ranks": null}', '{"ranks": ["2"]}', '"x"', "[" * 9999, "{", "{}"):
        file.write_text(wrong)
        assert slow_hosts(file, ABC) == set(), wrong
    kept = [state.host.name for state in without_slow(states([A, B, C]), {"a", "b"}, 2) if state.problem is None]
    assert kept == ["b", "c"]


SETTINGS = [
    *TINY_MODEL,
    *"--train-iters 9 --batch-size 2 --gas 2 --model-parallel-size 2 --pipe-parallel-size 2 --data-path d".split(),
    *"--vocab-file v --merge-file m --zero-stage 1 --sequence-parallel --save ck --auto-resume".split(),
]


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        ([1, 1, 1], {3, 2, 1}),  # 4 heads and 8 samples do not fall into 3 parts: 3 stages, or a host idles
        ([1], {1}),
    ],
)
def test_survivors_keep_the_global_batch(slots: list[int], sizes: set[int]) -> None:
    environ = {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "8"}
    run = parse_run(SETTINGS, environ)
    planned = plan_survivors(SETTINGS, run, slots, DEVICES["cpu"])
    ranks = sum(slots[: planned.hosts])
    again = parse_run(planned.arguments, {**environ, "WORLD_SIZE": str(ranks)})
    assert ranks in sizes and again.train.global_batch_size == run.train.global_batch_size == 8
    assert (again.parallel, again.train) == (planned.candidate.run.parallel, planned.candidate.run.train)
    # What is no part of a layout is as given: no placeholder of the planner's has got there.
    assert (again.optim, again.checkpoint, again.data, again.zero) == (run.optim, run.checkpoint, run.data, run.zero)


def test_survivors_within_memory() -> None:
    run = parse_run(SETTINGS, {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "8"})
    assert plan_survivors(SETTINGS, run, [1], DEVICES["cpu"]._replace(memory=1e5)) is None


@pytest.mark.parametrize(("ranks", "chosen"), [("8", "as given"), ("2", "TP "), ("1", "TP 1 x PP 1")])
def test_layout_at_a_world_size(ranks: str, chosen: str) -> None:
    """The given layout is TP 2 x PP 2, which needs a multiple of four ranks."""
    words = [*SETTINGS, "--global-batch-size", "8"]
    environ = {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": "1"}
    gas = words.index("--gas")
    arguments, text = arguments_at_world_size(words[:gas] + words[gas + 2 :], environ)
    run = parse_run(arguments, environ)
    assert run.train.global_batch_size == 8 and run.parallel.world_size == int(ranks) and chosen in text
    assert (arguments == words[:gas] + words[gas + 2 :]) is ("as given" in text)


@pytest.mark.parametrize(
    ("flag", "ranks", "megabytes", "as_given", "expert_ranks"),
    [
        (4, 6, 8000, False, {1, 2}),  # 4 divides no number of data-parallel ranks
        (1, 6, 8000, True, {1}),
        (0, 8, 80, False, {2, 4, 8}),  # without expert parallelism, which is not given, it would not fit
    ],
)
def test_layout_of_experts_at_a_world_size(
    monkeypatch: pytest.MonkeyPatch, flag: int, ranks: int, megabytes: int, as_given: bool, expert_ranks: set[int]
) -> None:
    monkeypatch.setitem(DEVICES, "cpu", DEVICES["cpu"]._replace(memory=megabytes * 10**6))
    words = "--num-experts 8 --moe-ffn-hidden-size 4096 --global-batch-size 24 --zero-stage 1 --train-iters 9"
    given = [*TINY_MODEL, *words.split(), "--model-parallel-size", "1", "--pipe-parallel-size", "0", "--mock-data"]
    given += ["--expert-model-parallel-size", str(flag)] if flag else []
    environ = {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "2"}
    arguments, text = arguments_at_world_size(given, environ)
    assert (arguments == given, "as given" in text) == (as_given, as_given)
    assert parse_run(arguments, environ).parallel.expert_model_parallel_size in expert_ranks


def test_a_world_size_without_a_layout() -> None:
    environ = {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "11"}
    with pytest.raises(ConfigError, match="needs --global-batch-size"):
        arguments_at_world_size(SETTINGS, environ)
    with pytest.raises(ConfigError, match="no layout of 11 ranks is supported and fits"):
        arguments_at_world_size([*TINY_MODEL, "--global-batch-size", "8", "--mock-data"], environ)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--elastic pretrain_gpt2.py", "--elastic needs --hostfile"),
        ("--rejoin --hostfile H pretrain_gpt2.py", "are for --elastic"),
        ("--elastic --hostfile H --device h9000 x.py", "'h9000'"),
        ("--elastic --hostfile H --device-memory lots x.py", "'lots' is not a size"),
        ("--device h100 --device-memory 1GB x.py", "for --elastic: --device, --device-memory;"),
        (
            "--elastic --hostfile H --launcher openmpi pretrain_gpt2.py",
            "--launcher openmpi is not supported with --elastic",
        ),
        ("--hostfile H pretrain_gpt2.py", "b is a spare host"),
        ("--elastic --hostfile H settings.json", "settings.json has settings and is no program"),
        ("--elastic --hostfile H pretrain_gpt2.py --deepspeed_config x.json --save ck", "as flags"),
        ("--elastic --hostfile H --min-hosts 3 x.py", "leave 2 hosts, 1 of them spare"),
        ("--elastic --hostfile H --include b x.py", "leave 1 host, 1 of them spare"),
    ],
)
def test_refused_before_a_start(tmp_path: Path, words: str, text: str) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("a slots=1\nb slots=1 spare\n")
    assert read_hostfile(hostfile)[1] == Host("b", (0,), spare=True)
    with pytest.raises(ConfigError, match=text):
        launch = read_launch([str(hostfile) if word == "H" else word for word in words.split()])
        ElasticRun(launch, {"DS_ACCELERATOR": "cpu"}, []) if launch.elastic else launcher_arguments(launch, {})


def test_the_device_that_is_planned_for(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("a slots=1\n")
    words = ["--elastic", "--hostfile", str(tmp_path / "hostfile")]
    launch = read_launch([*words, "--device-memory", "40GB", "x.py"])
    assert planned_device(launch, "cuda", lambda: "NVIDIA H100 80GB HBM3") == DEVICES["h100"]._replace(memory=40e9)
    assert planned_device(read_launch([*words, "x.py"]), "cpu") == DEVICES["cpu"]
    with pytest.raises(ConfigError, match="name the nearest by --device"):
        planned_device(launch, "cuda", lambda: "Another 5000")


def test_the_hosts_that_pdsh_is_connected_to() -> None:
    """A child of pdsh that is not ssh yet is none: it has the command line of pdsh, which has divided its words."""
    command = ["pdsh", "-S", "-w", "a", "b", "python", "x.py"]
    ssh = SimpleNamespace(name=lambda: "ssh", cmdline=lambda: ["ssh", "-x", "b", "export X=a; python x.py"])
    forked = SimpleNamespace(name=lambda: "pdsh.bin", cmdline=lambda: command, children=lambda recursive: [])

    def fail() -> str:
        raise psutil.NoSuchProcess(1)

    ended = SimpleNamespace(name=fail, cmdline=fail)
    pdsh = SimpleNamespace(
        name=lambda: "pdsh.bin", cmdline=lambda: command, children=lambda recursive: [ended, ssh, forked]
    )
    launcher = SimpleNamespace(children=lambda recursive: [ended, pdsh, ssh, forked])
    assert connections(launcher, ["a", "b"]) == {"b": ssh}


def watch_of(folder: Path, *hosts: Host, **run) -> Watch:
    """The watch over a start on ``hosts``, by default on A, of a run that saves in ``folder``."""
    parts = {"launch": SimpleNamespace(rejoin=False, ssh_port=None), "progress": lambda: "5", "save": folder}
    parts |= {"awaited": set(), "failed_at": None, "lock": SimpleNamespace(check=lambda **_: None), "token": "t"}
    return Watch(SimpleNamespace(**parts | run), Start([*(hosts or [A])], [], ""), folder)


def test_a_run_that_ends_by_a_signal_is_not_ended_to_rejoin(tmp_path: Path) -> None:
    watch, launcher = watch_of(tmp_path), SimpleNamespace(children=lambda recursive: [])
    watch._came_back = frozenset("ab")
    assert not watch(launcher, True) and not watch.hosts_rejoin
    assert watch(launcher, False) and watch.hosts_rejoin


def test_hosts_that_the_health_check_refuses_rejoin_once(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(elastic_watch, "_REJOIN_SECONDS", 0.0)
    watch = watch_of(tmp_path, look=list, choose=lambda _: Start([A, B], [], ""))
    watch._await_hosts()
    watch._came_back_at = "4"
    assert watch._came_back == frozenset("ab") and watch(None, False)
    assert not watch._is_better(Start([A, B], [], "")) and watch._is_better(Start([A, C], [], ""))
    capsys.readouterr()
    watch_of(tmp_path, look=lambda: 1 // 0, choose=None)._await_hosts()
    assert "ZeroDivisionError in the search" in capsys.readouterr().err


def test_the_address_of_a_lost_first_host_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("a slots=2\nb slots=2\n")
    words = ["--elastic", "--hostfile", str(tmp_path / "given"), "--master_addr", "10.0.0.1", "--force_multi", "x.py"]
    run = SimpleNamespace(launch=read_launch(words), regular=[A, B], _addresses={"a": "10.9.0.1", "b": "10.9.0.2"})
    addresses = [
        ElasticRun._launch_of(run, Start(hosts, [], ""), tmp_path).master_addr for hosts in ([A, C], [B, C], [C])
    ]
    assert addresses == ["10.0.0.1", "10.9.0.2", ""]
    here = ElasticRun._launch_of(run, Start([Host("localhost", (0,))], [], ""), tmp_path)
    assert here.force_multi, "as given"


def test_the_exit_codes_of_ranks_in_a_shared_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(EXIT_CODE_FOLDER, str(tmp_path))
    (tmp_path / ".nfs0001").write_text("x")
    (tmp_path / "rank 2").mkdir()
    for rank, code in ((10, "6"), (1, ""), (2, "7")):  # what cannot be written does not keep a rank from its end
        _write_exit_code(rank, code)
    assert list(read_exit_codes(tmp_path).items()) == [(1, ""), (10, "6")]


def too_few_hosts(*_: object) -> int:
    raise TooFewHostsError("1 host can take part, fewer than --min-hosts 2")


@pytest.mark.parametrize(
    ("run_elastic", "released"),
    [(lambda *_: signal.raise_signal(signal.SIGTERM), True), (too_few_hosts, False)],
)
def test_the_lock_is_given_back_unless_too_few_hosts_are_seen(monkeypatch, run_elastic, released) -> None:
    """By a signal between two starts. A supervisor that is cut off leaves it to a standby that sees more hosts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    launch = importlib.import_module("launch")
    done: list[str] = []
    lock = SimpleNamespace(take=lambda: done.append("taken"), release=lambda: done.append("released"))
    run = SimpleNamespace(lock=lock, choose=None, start=None, progress=None)
    monkeypatch.setattr(launch, "ElasticRun", lambda *_: run)
    monkeypatch.setattr(launch, "run_elastic", run_elastic)
    monkeypatch.setenv(HELPER, "")
    # As in a terminal: a shell's background processes ignore SIGINT.
    earlier = {number: signal.signal(number, signal.SIG_DFL) for number in FORWARDED}
    try:
        with pytest.raises((SystemExit, LaunchError)) as end:
            launch._run_elastic(read_launch(["--elastic", "--hostfile", "h", "x.py"]))
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    assert done == ["taken", *["released"] * released]
    assert isinstance(end.value, LaunchError) or end.value.code == PREEMPTED


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that watches and health checks see, which sleeping sets forward."""
    now = [0.0]
    for module in (elastic_watch, elastic_run, supervision):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


class Ssh:
    """A connection of pdsh that runs until it is closed."""

    def __init__(self) -> None:
        self.runs = True

    def is_running(self) -> bool:
        return self.runs

    def status(self) -> str:
        return "sleeping"


@pytest.mark.parametrize(
    ("codes", "seconds"),
    [
        ({2: "", 3: ""}, "signal"),
        ({2: "", 3: "6"}, 3),
        ({2: "1", 3: "6"}, 3),
        ({}, 3),
        ({2: "0", 3: "0"}, 60),
        ({2: "2", 3: "2"}, 60),
    ],
)
def test_ranks_of_other_hosts_are_ended_soon_unless_the_run_is_over(
    tmp_path, monkeypatch, clock, codes, seconds
) -> None:
    """They have a minute if no restart follows: those of the gone host have finished, or named a mistake."""
    by_signal, seconds = (True, 60) if seconds == "signal" else (False, seconds)  # its ranks may still be saving
    lines = {"a": Ssh(), "b": Ssh()}
    monkeypatch.setattr(elastic_watch, "connections", lambda *_: lines)
    watch = watch_of(tmp_path, A, B)
    for rank, code in codes.items():
        (tmp_path / f"rank {rank}").write_text(code)
    ended = []
    for clock[0] in (10.0, 20.0, 20.0 + seconds - 0.1, 20.0 + seconds):
        lines["b"].runs = clock[0] < 20
        ended.append(watch(None, by_signal))
    assert ended == [False, False, False, True] and watch.gone == {"b"}


def test_a_host_without_a_connection_is_gone(tmp_path, monkeypatch, clock) -> None:
    """Its ssh has ended before it was seen."""
    monkeypatch.setattr(elastic_watch, "connections", lambda *_: {"a": Ssh()})
    watch = watch_of(tmp_path, A, B)
    ended = [watch(None, False) for clock[0] in (1.0, 5.9, 6.1, 9.2)]
    assert ended == [False, False, False, True] and watch.gone == {"b"}


def run_with_health_checks(monkeypatch, folder: Path, check, **parts) -> SimpleNamespace:
    """An ElasticRun as far as ``check_hosts`` needs it, whose hosts are in the state that ``check`` returns."""
    monkeypatch.setattr(elastic_run, "owner_of", lambda _: None)
    monkeypatch.setattr(elastic_run, "host_states", lambda _: check())
    run = SimpleNamespace(save=folder, lock=SimpleNamespace(check=lambda: None), token="t", _used=(), _slow=set())
    run.launch, run.awaited = SimpleNamespace(min_hosts=1, ssh_port=None), set()
    run._examination = lambda: SimpleNamespace(_replace=lambda **_: None)
    run._too_few_answer = lambda found: ElasticRun._too_few_answer(run, found)
    vars(run).update(parts)
    return run


def test_hosts_of_a_started_run_have_a_minute_to_answer_again(monkeypatch, clock, tmp_path) -> None:
    """A network may fail for a moment, for all hosts at once; before the first start nothing is awaited."""
    run = run_with_health_checks(monkeypatch, tmp_path, lambda: states([A, B], "ab" if clock[0] < back else "a"))
    for run._used, back, last in ((frozenset("a"), 20, 20), (frozenset("a"), 999, 80), (frozenset(), 999, 80)):
        healthy = [state.host.name for state in ElasticRun.check_hosts(run, {}) if state.problem is None]
        assert (clock[0], healthy) == (last, ["b"] if back < 999 else [])


def test_idle_hosts_bring_their_snapshots_before_a_start(monkeypatch, tmp_path) -> None:
    """Those that the start does not use, the slow ones among them; a lost one has none that can be reached."""
    brought: list[list[str]] = []

    def bring(hosts: Sequence[Host], *_: object) -> None:
        brought.append([host.name for host in hosts])
        raise KeyboardInterrupt  # nothing is started

    monkeypatch.setattr(elastic_run, "bring_snapshots", bring)
    parts = {"_slow": {"b"}, "takes_snapshots": True, "run_config": ""}
    run = run_with_health_checks(monkeypatch, tmp_path, lambda: states([A, B, C, SPARE], "c"), **parts)
    healthy = [state.host for state in ElasticRun.check_hosts(run, {}) if state.problem is None]
    with pytest.raises(KeyboardInterrupt):
        ElasticRun.start(run, Start(healthy[:1], [], ""))
    assert [host.name for host in healthy] == ["a", "s"] and brought == [["b", "s"]]


def test_a_rank_0_that_is_stopped_ends_the_start(tmp_path, monkeypatch) -> None:
    """No other rank may be there to find it: it no longer renews its lock. One that is not of this run says nothing."""
    renewals: list[str | None] = [None, "1", *["2"] * 61]
    monkeypatch.setattr(elastic_watch, "last_renewal", lambda folder, run: renewals.pop(0))
    watch = watch_of(tmp_path)
    assert [watch._is_stopped() for _ in range(63)] == [False] * 62 + [True]


@pytest.mark.parametrize(
    ("codes", "later", "code", "patience", "seconds"),
    [
        ({0: "75", 1: "75"}, {}, 75, 60, 0),
        ({0: "75", 1: ""}, {}, 1, 0, 0),  # the ranks were on this host alone, and have ended with the launcher
        ({0: "75", 1: ""}, {1: "75"}, 75, 60, 60),  # it saves
        ({0: "75", 1: ""}, {}, 1, 60, 60),  # its host is lost
        ({0: "75", 1: "6"}, {}, 1, 60, 0),
        ({0: "75"}, {}, 75, 60, 0),  # the other one had not begun
        ({}, {}, 75, 60, 0),
    ],
)
def test_the_code_of_a_run_that_saves_after_a_signal(
    tmp_path, monkeypatch, clock, codes, later, code, patience, seconds
) -> None:
    """DeepSpeed's launcher ends with 1 while the ranks still save."""

    def leave(codes: Mapping[int, str]) -> None:
        for rank, text in codes.items():
            (tmp_path / f"rank {rank}").write_text(text)

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        leave(later)

    monkeypatch.setattr(supervision.time, "sleep", sleep)
    leave(codes)
    assert code_after_signal(tmp_path, 1, patience) == code
    assert clock[0] <= seconds + 1 and bool(clock[0]) is bool(seconds)


@pytest.mark.parametrize(
    ("codes", "signals", "code"),
    [
        ({0: "75", 1: "75"}, 1, 75),
        ({0: "6", 1: ""}, 1, 6),  # a rank had been killed before
        ({0: "6", 1: ""}, 2, 143),
        ({0: "6", 1: ""}, 0, 143),
    ],
)
def test_the_exit_code_of_a_run_that_is_preempted_while_it_fails(tmp_path, monkeypatch, codes, signals, code) -> None:
    """DeepSpeed's runner ends by the signal."""
    for rank, text in codes.items():
        (tmp_path / f"rank {rank}").write_text(text)
    monkeypatch.setattr(elastic_run, "launcher_arguments", lambda *_: [])
    monkeypatch.setattr(elastic_run, "supervise", lambda *_: supervision.LauncherExit(143, signals))
    run = SimpleNamespace(runner=[], environ={}, token="", program="gpt2")
    ended, _ = ElasticRun._supervise(run, SimpleNamespace(force_multi=False), watch_of(tmp_path, A, B), tmp_path)
    assert (ended.code, ended.by_signal) == (code, signals > 0)
