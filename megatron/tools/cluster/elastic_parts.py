"""The parts of ``tools/launch.py --elastic``: census, choice of a layout, start and watch of a real run."""

import hashlib
import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint.folder_lock import RUN_VARIABLE, FolderLock, displace, owner_of, remove_lock
from megatron.checkpoint.tracker import LATEST
from megatron.cli import parse_run
from megatron.cli.flags import read_flags
from megatron.cli.parser import CONFIG_FILE
from megatron.common.errors import ConfigError, LaunchError, ResourceError
from megatron.config import RunConfig
from megatron.tools.cluster.census import HostState, look_at_hosts, take_census
from megatron.tools.cluster.doctor import Examination
from megatron.tools.cluster.elastic import Ended, Start, failed_first, is_complete, pick_hosts
from megatron.tools.cluster.elastic_watch import ALIVE_SECONDS, END_SECONDS, Watch, names_of, ranks_in, ranks_of
from megatron.tools.cluster.hostfile import Host, read_hostfile, runs_here_alone, select
from megatron.tools.cluster.idle_memory import bring_snapshots
from megatron.tools.cluster.launching import launcher_words, training_program
from megatron.tools.cluster.recovery import Events
from megatron.tools.cluster.remote import device_kind, is_plain, ssh_options_for_pdsh
from megatron.tools.cluster.supervise import PREEMPTED, read_exit_codes, supervise
from megatron.tools.planning.request import bytes_of_text
from megatron.tools.planning.survivors import device_here, name_of_gpu, plan_survivors
from megatron.tools.planning.timing import DEVICES, Device

LOCK = ".supervisor.lock"
STRAGGLERS = "stragglers.json"
"""Of ``--straggler-report``, in the folder of the checkpoints."""
STARTS = "elastic.jsonl"
"""In the folder of the checkpoints: a line for each start that has ended."""
_CENSUS_SECONDS = 30.0
_PATIENCE_SECONDS, _PAUSE_SECONDS = 60.0, 5.0
"""How long to look, and how often, whether enough hosts of a run that has been started answer again."""
_LOOK_SECONDS = 0.2
"""Between two looks at the exit codes of ranks that end."""
_SILENT_SECONDS = 25.0
"""How long it is believed that a host does not answer. More than the time between two looks at lost hosts."""


class ElasticRun:
    """A run of ``launch`` as it is given, and what is done to start it again.

    Raises ConfigError for arguments that an elastic run cannot have, before anything is started.
    """

    def __init__(self, launch: Namespace, environ: Mapping[str, str], runner: Sequence[str]) -> None:
        self.launch, self.environ, self.runner = launch, environ, runner
        self.hosts = select(read_hostfile(launch.hostfile), launch.include, launch.exclude)
        self.regular = [host for host in self.hosts if not host.spare]
        self.device = device_kind(environ, Path.cwd())
        self.program = training_program(launch)
        self.run_config = self._read_run()
        self.save = self._save_folder()
        self.lock = FolderLock(self.save, LOCK, "is supervised for this folder")
        token = hashlib.sha256(str(self.save.resolve()).encode()).hexdigest()[:16]
        self.token = token  # the same for a supervisor that takes over
        self._excluded: Mapping[str, str] = {}
        self._slow: set[str] = set()
        self._healthy: list[Host] = []
        """As the last census has found them."""
        self._used: frozenset[str] = frozenset()
        """The names of the hosts of the last start."""
        self.rejoining: tuple[frozenset[str], int] | None = None
        """The hosts that the next start should have, and the number of ranks that it should exceed."""
        self.in_vain: set[frozenset[str]] = set()
        """Such hosts, with which a start for them had no more ranks."""
        self.silent: dict[str, tuple[float, str]] = {}
        """Hosts that did not answer: when by ``time.monotonic()``, and why."""
        self.lost: set[str] = set()
        """Hosts that did not answer the census."""
        self.events = Events()
        """Of the present start, and of the failure before it."""
        self._addresses: dict[str, str] = {}

    @property
    def takes_snapshots(self) -> bool:
        """Whether hosts may have a newer state in memory than the newest checkpoint."""
        return self.run_config is not None and self.run_config.checkpoint.snapshot_interval is not None

    def progress(self) -> str | None:
        """The newest checkpoint; None while there is none."""
        latest = self.save / LATEST
        return latest.read_text() if latest.is_file() else None

    def census(self, excluded: Mapping[str, str]) -> list[HostState]:
        """The state of all hosts but the excluded ones, after what is left of earlier starts has been ended.

        Raises CheckpointError if another supervisor has taken over.
        """
        self._excluded = excluded
        owner = owner_of(self.save)
        self.lock.check()
        oldest = time.monotonic() - _SILENT_SECONDS
        silent = {host: problem for host, (when, problem) in dict(self.silent).items() if when > oldest}
        variable = f"{RUN_VARIABLE}={self.token}"
        states, owner_has_ended = take_census(self._examination(), variable, owner, silent)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._used and self._too_few_answer(states) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)  # a network may fail for a moment
            self.lock.check()
            states, owner_has_ended = take_census(self._examination(), variable, owner, {})
        if owner is not None and owner_has_ended:
            remove_lock(self.save, owner)
        elif owner is not None and owner.run == self.token:  # cut off, it may train on: it must not save
            with suppress(OSError):
                displace(self.save, owner)
        self._healthy = [state.host for state in states if state.problem is None]
        self._addresses = {state.host.name: state.address for state in states}
        self.lost = {state.host.name for state in states if (state.problem or "").startswith("ssh: ")}
        self.events.note("examined")
        return without_slow(states, self._slow, self.launch.min_hosts)

    def _too_few_answer(self, states: Sequence[HostState]) -> bool:
        """Whether there would be enough hosts if those answered that do not."""
        healthy = sum(state.problem is None for state in states)
        silent = sum((state.problem or "").startswith(("ssh: ", "name: ")) for state in states)
        return healthy < self.launch.min_hosts <= healthy + silent

    def choose(self, states: Sequence[HostState]) -> Start | None:
        """The run as given, if enough hosts are healthy; else on the layout that the planner chooses; None: none fits.

        Raises ConfigError if the planner does not know the arguments.
        """
        hosts = pick_hosts(self.regular, states)
        if is_complete(self.regular, hosts):
            return Start(hosts, self.launch.arguments, "the layout as given")
        if self.program is None or self.run_config is None or not hosts:
            return None
        planned = plan_survivors(
            self.launch.arguments,
            self.run_config,
            [len(host.slots) for host in hosts],
            planned_device(self.launch, self.device),
            least=self.launch.min_hosts,
            architecture=self.program,
        )
        if planned is None:
            return None
        idle = f", {' '.join(host.name for host in hosts[planned.hosts :])} idle" if planned.hosts < len(hosts) else ""
        return Start(hosts[: planned.hosts], planned.arguments, f"{planned}{idle}")

    def start(self, start: Start) -> Ended:
        """Run ``start`` to its end, to the loss of a host, or to the checkpoint after which lost hosts rejoin.

        Raises CheckpointError if another supervisor has taken over; ResourceError if ``--save`` cannot be written.
        """
        self.lock.check()
        self.events.note("chosen")
        self._note_rejoining(start)
        if self.run_config is not None and self.takes_snapshots:
            idle = [host for host in self._healthy if host.name not in names_of(start)]
            bring_snapshots(idle, self.run_config, self.launch.ssh_port)
        self._used = names_of(start)
        with tempfile.TemporaryDirectory(prefix="elastic-") as folder, _folder_in(self.save) as exit_codes:
            launch = self._launch_of(start, Path(folder))
            command = [*self.runner, *launcher_words(launch, self.environ)]
            environ = {
                **self.environ,
                **ssh_options_for_pdsh(self.environ, alive=ALIVE_SECONDS),
                RUN_VARIABLE: self.token,
            }
            (self.save / STRAGGLERS).unlink(missing_ok=True)
            watch, began = Watch(self, start, Path(exit_codes)), time.time()
            try:
                ended = supervise(command, environ, watch, Path(exit_codes))
            finally:
                watch.close()
            code = ended.code
            if ended.by_signal and self.program is not None:  # others may leave no exit codes
                may_save = launch.force_multi and not ended.was_stopped  # which has waited as long already
                code = code_after_signal(Path(exit_codes), code, END_SECONDS if may_save else 0.0)
            codes = read_exit_codes(Path(exit_codes))
        if ended.was_stopped:
            codes = with_ended(codes, start.hosts, watch.gone)
        if self.launch.exclude_stragglers:
            self._slow |= slow_hosts(self.save / STRAGGLERS, start.hosts)
        result = Ended(code, ended.by_signal, failed_first(start.hosts, codes), watch.hosts_rejoin)
        self._record(start, result, began)
        self.events = watch.failure
        for event in ("noticed", "ended"):
            self.events.note(event)
        return result

    def look(self) -> list[HostState]:
        """The state of all hosts while the run continues there."""
        states = look_at_hosts(self._examination())
        for state in states:
            self.silent.pop(state.host.name, None)
            if state.problem is not None and state.problem.startswith("ssh: "):
                self.silent[state.host.name] = time.monotonic(), state.problem
        return without_slow(states, self._slow, self.launch.min_hosts)

    def _note_rejoining(self, start: Start) -> None:
        """Remember the hosts with which the run was to start, if ``start`` has no more ranks than without them."""
        if self.rejoining is not None and ranks_in(start) <= self.rejoining[1]:
            self.in_vain.add(self.rejoining[0])
        self.rejoining = None
        self.in_vain.discard(names_of(start))

    def _record(self, start: Start, ended: Ended, began: float) -> None:
        """Add the start to the log of the run, for those who want to know later."""
        hosts = [host.name for host in start.hosts]
        line = {"began": began, "ended": time.time(), "hosts": hosts, "layout": start.layout, "code": ended.code}
        line |= {"failed_first": sorted(ended.failed_first), "newest_checkpoint": self.progress()}
        line |= {"events": dict(self.events)}
        with suppress(OSError), open(self.save / STARTS, "a") as file:  # a full disk is for the run itself to report
            file.write(json.dumps(line) + "\n")

    def _launch_of(self, start: Start, folder: Path) -> Namespace:
        """The launch of ``start``, with a hostfile in ``folder``."""
        hostfile = folder / "hostfile"
        hostfile.write_text("".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in start.hosts))
        include = "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in start.hosts)
        of_start = {"hostfile": hostfile, "include": include, "exclude": "", "arguments": start.arguments}
        of_start["no_ssh_check"] = True  # the census has just been there
        first = start.hosts[0].name
        if first != self.regular[0].name or not self.launch.master_addr:
            of_start["master_addr"] = self._addresses.get(first, "")  # without one DeepSpeed asks the host
        # DeepSpeed would start the ranks of a single host here, wherever that is.
        force_multi = self.launch.force_multi or not runs_here_alone(start.hosts)
        return Namespace(**{**vars(self.launch), **of_start, "force_multi": force_multi})

    def _examination(self) -> Examination:
        launch = self.launch
        return Examination(
            hosts=[host for host in self.hosts if host.name not in self._excluded],
            run=self.run_config,
            config_file=None,
            device=self.device,
            environ=self.environ,
            uses_ssh=True,
            master_address=launch.master_addr,
            master_port=launch.master_port,
            ssh_port=launch.ssh_port,
            seconds=_CENSUS_SECONDS,
        )

    def _read_run(self) -> RunConfig | None:
        """The run as given; None if the planner does not know its program."""
        if self.program is None:
            return None
        if (given := read_flags(self.launch.arguments, self.program).values.get(CONFIG_FILE)) is not None:
            raise ConfigError(f"--elastic chooses layouts anew: give the settings of {given.source} as flags")
        ranks = sum(len(host.slots) for host in self.regular)
        place = {"DS_ACCELERATOR": self.device, "WORLD_SIZE": str(ranks)}
        return parse_run(self.launch.arguments, {**self.environ, **place}, self.program)

    def _save_folder(self) -> Path:
        flags = {field: flag.value for field, flag in read_flags(self.launch.arguments).values.items()}
        folder = Path(flags["save"]).absolute()
        if not is_plain(str(folder)):
            raise ConfigError(f"--save {folder}: --elastic needs a path of letters, digits and @_+=:,./-")
        return folder


def _folder_in(save: Path) -> tempfile.TemporaryDirectory:
    """A folder for the exit codes of all ranks, on all hosts. Raises ResourceError if it cannot be made."""
    try:
        return tempfile.TemporaryDirectory(prefix=".ranks-", dir=save, ignore_cleanup_errors=True)
    except OSError as error:
        raise ResourceError(f"--save {save}: no folder can be made there: {error.strerror}") from error


def code_after_signal(folder: Path, code: int, patience: float) -> int:
    """The code that all ranks have left in ``folder`` after a signal, 75 if they have saved; else ``code``.

    For several hosts DeepSpeed's launcher ends with ``code`` a second after the signal: ranks that have begun have
    ``patience`` seconds to end. If none has, there was nothing to save.
    """
    deadline = time.monotonic() + patience
    while "" in (codes := read_exit_codes(folder)).values() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    left = set(codes.values()) or {str(PREEMPTED)}
    return int(left.pop()) if len(left) == 1 and "" not in left else code


def with_ended(codes: Mapping[int, str], hosts: Sequence[Host], gone: set[str]) -> dict[int, str]:
    """``codes``, with 6 for the ranks that ran when they were ended because of ranks on the hosts ``gone``.

    If those have ended because of others themselves, one that ran hung: the codes stay as they are.
    """
    others = str(LaunchError.exit_code)
    if all(codes.get(rank, "") == others for rank in ranks_of(hosts, gone)):
        return dict(codes)
    ran = ranks_of(hosts, {host.name for host in hosts} - gone)
    return {**codes, **{rank: codes.get(rank) or others for rank in ran}}


def slow_hosts(file: Path, hosts: Sequence[Host]) -> set[str]:
    """The names in the hostfile of the hosts with the ranks that ``--straggler-report`` has named in ``file``."""
    try:
        ranks = json.loads(file.read_text())["ranks"]
    except (OSError, ValueError, KeyError):
        return set()
    names = [host.name for host in hosts for _ in host.slots]
    return {names[rank] for rank in ranks if rank < len(names)}


def without_slow(states: Sequence[HostState], slow: Collection[str], least: int) -> list[HostState]:
    """``states`` with a problem for each slow host, as long as ``least`` hosts have none."""
    healthy = sum(state.problem is None for state in states)
    found = []
    for state in states:
        is_dropped = state.problem is None and state.host.name in slow and healthy > least
        healthy -= is_dropped
        found.append(state._replace(problem="slower than others: --exclude-stragglers") if is_dropped else state)
    return found


def planned_device(launch: Namespace, kind: str, query: Callable[[], str] = name_of_gpu) -> Device:
    """The device that the planner plans for. Raises ConfigError if it is not known, or ``--device`` names none."""
    if launch.device and launch.device not in DEVICES:
        raise ConfigError(f"--device {launch.device}: the planner knows {', '.join(DEVICES)}")
    device = DEVICES[launch.device] if launch.device else device_here(kind, query)
    if device is None:
        names = "|".join(DEVICES)
        raise ConfigError(f"--elastic plans for a device that it does not know: name the nearest by --device {names}")
    return device._replace(memory=bytes_of_text(launch.device_memory)) if launch.device_memory else device
