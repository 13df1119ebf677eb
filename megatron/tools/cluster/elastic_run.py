"""The elastic agent's actions: check hosts, choose a layout with the planner, start the ranks and watch them."""

import hashlib
import json
import shlex
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint.folder_lock import RUN_VARIABLE, FolderLock, displace, owner_of
from megatron.checkpoint.snapshot_files import brought_folder, snapshot_folder
from megatron.cli import parse_run
from megatron.cli.flags import read_flags
from megatron.cli.parser import CONFIG_FILE
from megatron.common.errors import ConfigError, LaunchError, ResourceError, counted
from megatron.common.files import append_only
from megatron.config import RunConfig
from megatron.tools.cluster.doctor import HostState, host_states
from megatron.tools.cluster.elastic import (
    Start,
    StartResult,
    announce,
    failed_first,
    healthy_count,
    is_complete,
    pick_hosts,
    slow_hosts,
    with_ended,
    without_slow,
)
from megatron.tools.cluster.elastic_watch import ALIVE_SECONDS, END_SECONDS, Watch
from megatron.tools.cluster.hostfile import Host, read_hostfile, runs_here_alone, select
from megatron.tools.cluster.launching import (
    check_program,
    checkpoint_folder,
    launcher_arguments,
    newest_checkpoint,
    training_program,
)
from megatron.tools.cluster.probe_hosts import Examination
from megatron.tools.cluster.remote import device_kind, is_plain, ssh_command, ssh_options_for_pdsh
from megatron.tools.cluster.supervise import code_after_signal, read_exit_codes, supervise
from megatron.tools.planning.machine import DEVICES, Device
from megatron.tools.planning.survivors import device_here, name_of_gpu, plan_survivors

LOCK = ".supervisor.lock"
STRAGGLERS = "stragglers.json"
"""File of ``--straggler-report`` in the checkpoint folder."""
STARTS = "elastic.jsonl"
"""Log in the checkpoint folder, with a line for each start that has ended."""
_CHECK_SECONDS, _KILL_SECONDS = 30.0, 5.0
_PATIENCE_SECONDS, _PAUSE_SECONDS = 60.0, 5.0
"""Maximum time, and interval, of repeated checks until enough hosts of a started run answer again."""


class ElasticRun:
    """A run with the command line ``launch``, and the actions to start and restart it.

    Raises ConfigError, before anything is started, for arguments that are not supported in an elastic run.
    """

    def __init__(self, launch: Namespace, environ: Mapping[str, str], runner: Sequence[str]) -> None:
        self.launch, self.environ, self.runner = launch, environ, runner
        self.hosts = select(read_hostfile(launch.hostfile), launch.include, launch.exclude)
        self.regular = [host for host in self.hosts if not host.spare]
        if not self.regular or len(self.hosts) < launch.min_hosts:
            hosts = f"{counted(len(self.hosts), 'host')}, {len(self.hosts) - len(self.regular)} of them spare"
            least = f"--elastic needs one that is not spare, and --min-hosts {launch.min_hosts}"
            raise ConfigError(f"{launch.hostfile}, --include and --exclude leave {hosts}: {least}")
        check_program(launch, self.hosts)
        self.device = device_kind(environ, Path.cwd())
        self.program = training_program(launch)
        self.run_config = self._read_run()
        self.save = checkpoint_folder(launch.arguments, elastic=True)
        if not is_plain(str(self.save)):
            raise ConfigError(f"--save {self.save}: --elastic needs a path of letters, digits and @_+=:,./-")
        self.lock = FolderLock(self.save, LOCK, "is supervised for this folder")
        # An agent that takes over the run has the same token.
        self.token = hashlib.sha256(str(self.save.resolve()).encode()).hexdigest()[:16]
        self._excluded: Mapping[str, str] = {}
        self._slow: set[str] = set()
        self._healthy: list[Host] = []
        """Healthy hosts of the last health check."""
        self._addresses: dict[str, str] = {}
        self._used: frozenset[str] = frozenset()
        """The names of the hosts of the last start."""
        self.awaited: set[frozenset[str]] = set()
        """Sets of hosts for which a start was ended after a checkpoint, and which have not started together since."""
        self.failed_at: float | None = None
        """Time at which the failure was noticed from which the current start recovers."""

    @property
    def takes_snapshots(self) -> bool:
        """Whether hosts may have a snapshot in memory that is newer than the newest checkpoint."""
        return self.run_config is not None and self.run_config.checkpoint.snapshot_interval is not None

    def progress(self) -> str | None:
        """The newest checkpoint; None while there is none."""
        return newest_checkpoint(self.save)

    def check_hosts(self, excluded: Mapping[str, str]) -> list[HostState]:
        """The state of all hosts except the excluded ones, after the processes of earlier starts have been ended.

        Raises CheckpointError if another agent has taken over.
        """
        self._excluded = excluded
        owner = owner_of(self.save)
        process = owner and [owner.machine, owner.pid, owner.started]
        leftovers = {"variable": f"{RUN_VARIABLE}={self.token}", "seconds": _KILL_SECONDS, "owner": process}
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            self.lock.check()
            states = host_states(self._examination()._replace(leftovers=leftovers))
            if not (self._used and self._too_few_answer(states) and time.monotonic() < deadline):
                break
            time.sleep(_PAUSE_SECONDS)  # the network may be down for a moment
        # A host that is cut off may continue to train, but must not save: its lock is taken away.
        has_ended = any(state.owner_has_ended for state in states)
        if owner is not None and (has_ended or owner.run == self.token):
            with suppress(OSError):
                displace(self.save, owner)
        self._healthy = [state.host for state in states if state.problem is None]
        self._addresses = {state.host.name: state.address for state in states}
        return without_slow(states, self._slow, self.launch.min_hosts)

    def look(self) -> list[HostState]:
        """The state of all hosts, without ending processes: for use while the run continues."""
        return without_slow(host_states(self._examination()), self._slow, self.launch.min_hosts)

    def _too_few_answer(self, states: Sequence[HostState]) -> bool:
        """Whether there are too few healthy hosts only because some do not answer."""
        silent = sum((state.problem or "").startswith("ssh: ") for state in states)
        return healthy_count(states) < self.launch.min_hosts <= healthy_count(states) + silent

    def choose(self, states: Sequence[HostState]) -> Start | None:
        """The start with the given layout, if enough hosts are healthy; else with a layout from the planner, or None.

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

    def start(self, start: Start) -> StartResult:
        """Run ``start`` to its end, to the loss of a host, or to the checkpoint after which lost hosts rejoin.

        Raises CheckpointError if another agent has taken over; ResourceError if ``--save`` cannot be written.
        """
        self.lock.check()
        self.awaited.discard(start.names)
        if self.run_config is not None and self.takes_snapshots:
            idle = [host for host in self._healthy if host.name not in start.names]
            bring_snapshots(idle, self.run_config, self.launch.ssh_port)
        self._used = start.names
        (self.save / STRAGGLERS).unlink(missing_ok=True)
        began = time.time()
        with tempfile.TemporaryDirectory(prefix="elastic-") as folder, _folder_in(self.save) as exit_codes:
            watch = Watch(self, start, Path(exit_codes))
            ended, codes = self._supervise(self._launch_of(start, Path(folder)), watch, Path(exit_codes))
        if self.launch.exclude_stragglers:
            self._slow |= slow_hosts(self.save / STRAGGLERS, start)
        result = ended._replace(failed_first=failed_first(start, codes), to_rejoin=watch.hosts_rejoin)
        self._record(start, result, began)
        self.failed_at = watch.noticed or time.time()
        return result

    def _supervise(self, launch: Namespace, watch: Watch, exit_codes: Path) -> tuple[StartResult, dict[int, str]]:
        """Run the launcher to its end. Returns how it has ended, and the exit code of each rank."""
        command = [*self.runner, *launcher_arguments(launch, self.environ)]
        environ = {**self.environ, **ssh_options_for_pdsh(self.environ, alive=ALIVE_SECONDS), RUN_VARIABLE: self.token}
        try:
            ended = supervise(command, environ, watch, exit_codes)
        finally:
            watch.is_over.set()
        code = ended.code
        if ended.signals and self.program is not None:  # other programs may write no exit codes
            code = code if ended.signals > 1 else LaunchError.exit_code  # not all ranks may have saved
            may_save = launch.force_multi and not ended.was_stopped  # the watch has already waited as long
            code = code_after_signal(exit_codes, code, END_SECONDS if may_save else 0.0)
        codes = read_exit_codes(exit_codes)
        if ended.was_stopped:
            codes = with_ended(codes, watch.start, watch.gone)
        return StartResult(code, ended.signals > 0), codes

    def _record(self, start: Start, ended: StartResult, began: float) -> None:
        """Append the start to the log of the run."""
        hosts = [host.name for host in start.hosts]
        line = {"began": began, "ended": time.time(), "hosts": hosts, "layout": start.layout, "code": ended.code}
        line |= {"failed_first": sorted(ended.failed_first), "newest_checkpoint": self.progress()}
        with (
            suppress(OSError),
            open(self.save / STARTS, "a", opener=append_only) as file,
        ):  # the run itself reports a full disk
            file.write(json.dumps(line) + "\n")

    def _launch_of(self, start: Start, folder: Path) -> Namespace:
        """The launcher's command line for ``start``, with a hostfile in ``folder``."""
        hostfile = folder / "hostfile"
        hostfile.write_text("".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in start.hosts))
        include = "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in start.hosts)
        flags = {"hostfile": hostfile, "include": include, "exclude": "", "arguments": start.arguments}
        flags["no_ssh_check"] = True  # the health check has just used ssh
        first = start.hosts[0].name
        if first != self.regular[0].name or not self.launch.master_addr:
            flags["master_addr"] = self._addresses.get(first, "")  # if empty, DeepSpeed asks the host
        # DeepSpeed would start the ranks of a single host on this host, even if it is another one.
        force_multi = self.launch.force_multi or not runs_here_alone(start.hosts)
        return Namespace(**{**vars(self.launch), **flags, "force_multi": force_multi})

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
            seconds=_CHECK_SECONDS,
        )

    def _read_run(self) -> RunConfig | None:
        """The configuration of the run with the given arguments; None if the planner does not know its program."""
        if self.program is None:
            return None
        if (given := read_flags(self.launch.arguments, self.program).values.get(CONFIG_FILE)) is not None:
            raise ConfigError(f"--elastic chooses the layout again: give the settings of {given.source} as flags")
        ranks = sum(len(host.slots) for host in self.regular)
        variables = {"DS_ACCELERATOR": self.device, "WORLD_SIZE": str(ranks)}
        return parse_run(self.launch.arguments, {**self.environ, **variables}, self.program)


def _folder_in(save: Path) -> tempfile.TemporaryDirectory:
    """A temporary folder in ``save``, shared by all hosts, for the ranks' exit codes. Raises ResourceError."""
    try:
        return tempfile.TemporaryDirectory(prefix=".ranks-", dir=save, ignore_cleanup_errors=True)
    except OSError as error:
        raise ResourceError(f"--save {save}: no folder can be made there: {error.strerror}") from error


def planned_device(launch: Namespace, kind: str, query: Callable[[], str] = name_of_gpu) -> Device:
    """The device to plan for. Raises ConfigError if it is unknown."""
    device = DEVICES[launch.device] if launch.device else device_here(kind, query)
    if device is None:
        names = "|".join(DEVICES)
        raise ConfigError(f"--elastic plans for a device that it does not know: name the nearest by --device {names}")
    return device._replace(memory=launch.device_memory) if launch.device_memory else device


_COPY_SECONDS = 600.0
"""Time limit of copying a snapshot, after which the run starts without it."""


def bring_snapshots(hosts: Sequence[Host], run: RunConfig, port: int | None) -> None:
    """Move snapshots of ``run`` from the memory of ``hosts`` to the checkpoint folder; failures are announced."""
    folder, save = snapshot_folder(run.checkpoint), Path(str(run.checkpoint.save)).absolute()
    if hosts:
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(lambda host: _bring(host.name, moving(folder, save, host.name), port), hosts))


def moving(folder: Path, save: Path, host: str) -> list[str]:
    """The command that moves ``folder`` from the memory of ``host`` to ``save``; if the copy fails, it is kept."""
    here, there = (shlex.quote(str(path)) for path in (folder, brought_folder(save, host)))
    move = f"rm -rf {there}; if cp -r {here} {there}; then rm -r {here}; else rm -rf {there}; false; fi"
    return ["sh", "-c", f"test ! -d {here} || {{ {move}; }}"]


def _bring(host: str, command: Sequence[str], port: int | None) -> None:
    try:
        done = subprocess.run(ssh_command(host, command, port), capture_output=True, text=True, timeout=_COPY_SECONDS)
        problem = " ".join(done.stderr.split()[-20:]) or f"exit code {done.returncode}" if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem is not None:
        announce(f"the snapshots of {host}, which is idle, cannot be brought to the disk: {problem}")
