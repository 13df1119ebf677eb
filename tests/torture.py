"""Hit an elastic run on four hosts with random faults, again and again, and check that it loses nothing.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PYTHONPATH=. python tests/torture.py --faults 50 --seed 1

The hosts are network namespaces (as root, see ``support/hosts.py``): a pipeline of three stages and a spare host; the
elastic agent is on a fifth one. Faults come in bursts, at random times, while the ranks train, save or start again;
after each burst two iterations must be trained. If the agent has ended, it is started again, as by a scheduler. In the
end it is preempted. Then each exit code must have been one that is documented for the fault, no process may be left on
any host, the newest checkpoint must be complete to the last bit, each loss must be the loss of an undisturbed run (bit
by bit, if the layout was never changed), and each sample must have been used once. Equal seeds choose the same faults.
"""

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support import warm_hosts
from support.hosts import INTERFACE, ROOT, Hosts
from support.programs import TINY_MODEL, Programs, read_metrics

from megatron.checkpoint.folder_lock import RUN_VARIABLE
from megatron.checkpoint.manifest import check_content, read_manifest
from megatron.checkpoint.tracker import newest
from megatron.tools.command_line import ToolParser, run_tool

STAGES, COUNT, DISK, PATIENCE = 3, 4, "48m", 400.0
SETTINGS = (
    *TINY_MODEL,
    *"--hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --batch-size 2 --eval-iters 0".split(),
    *f"--zero-stage 1 --pipe-parallel-size {STAGES} --train-iters 20000".split(),
)
MODES = ("--save-interval 1", "--save-interval 1 --async-save", "--save-interval 10 --snapshot-interval 1")
"""How the run of a seed saves."""
RESTARTED, PREEMPTED, KILLED = {6, 7}, 75, -signal.SIGKILL
CLOCK = """
import sys, time
_time = time.time
def jumped():
    try:
        return _time() + float(open({file!r}).read() or 0)
    except (OSError, ValueError):
        return _time()
if not any("launch" in word for word in sys.orig_argv):
    time.time = jumped
"""
"""For ``sitecustomize.py``: ranks see a clock that jumps when the file changes."""


class ElasticRun:
    """An elastic run on the hosts, in ``folder``."""

    def __init__(self, programs: Programs, folder: Path, chance: random.Random, seed: int) -> None:
        self.programs, self.folder, self.chance = programs, folder, chance
        self.save, self.metrics, self.log, self.clock = (folder / name for name in ("ck", "metrics", "log", "clock"))
        for name in ("hosts", "ck", "site"):
            (folder / name).mkdir()
        self.hosts = Hosts(folder / "hosts", COUNT + 1)
        *self.names, self.agent_host = self.hosts.names
        lines = "".join(f"{name} slots=1\n" for name in self.names)
        (folder / "hostfile").write_text(lines.removesuffix("\n") + " spare\n")
        (folder / "site" / "sitecustomize.py").write_text(CLOCK.format(file=str(self.clock)))
        sent = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        (folder / "sent").write_text("".join(f"{name}={value}\n" for name, value in sent.items()))
        self.saving = (*MODES[seed % len(MODES)].split(), "--keep-last", "3")
        self.rejoin = ["--rejoin"] if seed % 2 else []
        self.agent: subprocess.Popen
        self.expected, self.codes = set(RESTARTED), Counter[int]()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The hosts, a small disk for checkpoints, and the agent; all of them are gone at the end."""
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(self.save)], check=True)
        try:
            with warm_hosts.start(self.folder / "site", self.log) as server, self.hosts:
                try:
                    self.start()
                    yield
                finally:
                    server.kill()
        finally:
            subprocess.run(["umount", "-l", str(self.save)], check=True)

    def start(self) -> None:
        """Start the elastic agent."""
        self.told_before = self.log.stat().st_size
        self.agent = self.launch(self.save, self.metrics, *self.saving)

    def launch(self, save: Path, metrics: Path, *words: str) -> subprocess.Popen:
        """An elastic agent on its host."""
        command = [
            *(*self.hosts.on(self.agent_host), sys.executable, "tools/launch.py", "--elastic", "--min-hosts", "2"),
            *("--exclude-after", "9", *self.rejoin, "--hostfile", str(self.folder / "hostfile"), "pretrain_gpt2.py"),
            *(*SETTINGS, *self.programs.data_arguments, "--watchdog-minutes", "0.2"),
            *("--distributed-timeout-minutes", "1", "--save", str(save), "--auto-resume"),
            *("--metrics-file", str(metrics), *words),
        ]
        environ = {"DS_ENV_FILE": str(self.folder / "sent"), "PYTHONPATH": str(self.folder / "site")}
        with open(self.log, "a") as log:
            return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environ}, stdout=log, stderr=log)

    def trained(self) -> int:
        """Lines of metrics."""
        return self.metrics.read_text().count("\n") if self.metrics.exists() else 0

    def in_use(self) -> list[str]:
        """The hosts of the newest start; all of them before the first one."""
        starts = re.findall(r"launch\.py: elastic: \d+ ranks? on ([^,:]*)", self.log.read_text())
        return starts[-1].split() if starts else self.names

    def must_train(self) -> None:
        """Wait for two more iterations; an agent that has ended with an expected code is started again."""
        enough, deadline = None, time.monotonic() + PATIENCE
        while enough is None or self.trained() < enough:
            if (code := self.agent.poll()) is not None:
                self.note(code)
                self.start()
                enough = None
            # Not before: ranks of an agent that was killed may train a little longer.
            elif enough is None and b"launch.py: elastic: " in self.log.read_bytes()[self.told_before :]:
                enough = self.trained() + 2
            assert time.monotonic() < deadline, self.told("no training")
            time.sleep(0.05)

    def note(self, code: int) -> None:
        """Count an exit code of the agent. Raises AssertionError if it is not expected."""
        assert code in self.expected, self.told(f"exit code {code}, not one of {sorted(self.expected)}")
        self.expected = set(RESTARTED)
        self.codes[code] += 1

    def told(self, problem: str) -> str:
        """``problem`` and the end of the log."""
        return f"{problem}:\n{self.log.read_text()[-6000:]}"

    def signal_processes(self, host: str, name: str, *pattern: str) -> None:
        """Send a signal to the processes on ``host`` that pkill finds."""
        subprocess.run([*self.hosts.on(host), "pkill", f"-{name}", *pattern], stderr=subprocess.DEVNULL)

    def end(self) -> None:
        """Preempt the run, as a scheduler does, and check how it ends."""
        code = 0
        while code != PREEMPTED:  # 6 if a fault takes effect only now
            self.must_train()
            preempt(self, "")
            self.note(code := self.agent.wait(PATIENCE))
            if code != PREEMPTED:
                self.start()
        deadline = time.monotonic() + 60
        for host in self.hosts.names:
            self.hosts.await_end(host, str(self.save))
            while left := self.processes(host):
                assert time.monotonic() < deadline, self.told(f"{host} has processes left: {left}")
                time.sleep(0.5)

    def processes(self, host: str) -> str:
        """Those of the run."""
        token = hashlib.sha256(str(self.save).encode()).hexdigest()[:16]
        command = [*self.hosts.on(host), "sh", "-c", f"grep -ls {RUN_VARIABLE}={token} /proc/[0-9]*/environ"]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout

    def check(self) -> tuple[int, dict[int, float]]:
        """The number of iterations, and by how much losses differ from the undisturbed run's, where they do."""
        saved = newest(self.save, strict=True)
        for name, record in read_manifest(saved.path).items():
            check_content(saved.path / name, record)
        found = [(line["iteration"], line["lm_loss"]) for line in read_metrics(self.metrics)]
        assert saved.iteration == found[-1][0] and not list(self.save.glob("*.partial"))
        words = ("proof", "--load", str(self.save), "--metrics-file", str(self.metrics))
        self.programs.warm(1, "tools/audit_data.py", *words).ok()
        expected = self.undisturbed(max(iteration for iteration, _ in found))
        assert {iteration for iteration, _ in found} == set(expected)
        return len(expected), {step: abs(loss - expected[step]) for step, loss in found if loss != expected[step]}

    def undisturbed(self, iterations: int) -> dict[int, float]:
        """The losses without faults. On one host sums of ranks would be rounded in another order."""
        words = ("--exit-interval", str(iterations), "--save-interval", "20000")
        agent = self.launch(self.folder / "whole", self.folder / "expected", *words)
        assert agent.wait(PATIENCE + iterations) == 0, self.told("the undisturbed run")
        return {line["iteration"]: line["lm_loss"] for line in read_metrics(self.folder / "expected")}


AGENT, LAUNCHER, RANK = ("-f", "tools/launch.py"), ("-x", warm_hosts.LAUNCHER_NAME), ("-x", warm_hosts.RANK_NAME)


def kill_ranks(run: ElasticRun, host: str) -> None:
    """By a signal that a crash or an administrator sends."""
    run.signal_processes(host, run.chance.choice(("KILL", "SEGV", "ABRT", "BUS")), *RANK)


def kill_launcher(run: ElasticRun, host: str) -> None:
    """DeepSpeed's, on the host."""
    run.signal_processes(host, "KILL", *LAUNCHER)


def cut_ssh(run: ElasticRun, host: str) -> None:
    """End the agent's connection to the host."""
    run.signal_processes(run.agent_host, "KILL", "-f", f"^ssh .*{host}")


def stop_ranks(run: ElasticRun, host: str) -> None:
    """For a moment, or until they are found to hang."""
    run.signal_processes(host, "STOP", *RANK)
    if run.chance.random() < 0.8:
        time.sleep(run.chance.uniform(0, 4))
        run.signal_processes(host, "CONT", *RANK)


def lose_host(run: ElasticRun, host: str) -> None:
    """All of it; it is back later."""
    run.hosts.kill(host)
    time.sleep(run.chance.uniform(0, 4))
    run.hosts.start_again(host)


def cut_link(run: ElasticRun, host: str) -> None:
    """For less than what ssh waits for, or more."""
    run.hosts.cut(host)
    time.sleep(run.chance.uniform(0, 4) if run.chance.random() < 0.8 else 12)
    run.hosts.cut(host, "up")


def fill_disk(run: ElasticRun, _: str) -> None:
    """For a moment."""
    filler = run.save / "filler"
    with suppress(OSError), open(filler, "ab", buffering=0) as file:
        while True:
            file.write(b"\0" * (1 << 16))
    time.sleep(run.chance.uniform(0, 2))
    filler.unlink(missing_ok=True)


def damage_newest(run: ElasticRun, host: str) -> None:
    """Change a byte of a file of the newest checkpoint; the ranks of a host are killed, so that it is read."""
    with suppress(OSError, IndexError, ValueError):  # the checkpoint was removed meanwhile
        file = run.chance.choice(sorted((run.save / (run.save / "latest").read_text()).iterdir()))
        with open(file, "r+b") as opened:
            opened.seek(run.chance.randrange(file.stat().st_size))
            byte = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte[0] ^ 1]))
    kill_ranks(run, host)


def jump_clock(run: ElasticRun, _: str) -> None:
    """By up to a day, in either direction."""
    run.clock.write_text(str(run.chance.uniform(-86400, 86400)))


def preempt(run: ElasticRun, _: str) -> None:
    """SIGTERM to the agent: what runs is saved, unless it is the second one."""
    if run.agent.poll() is None:
        run.expected.add(128 + signal.SIGTERM if PREEMPTED in run.expected else PREEMPTED)
    run.signal_processes(run.agent_host, "TERM", *AGENT)


def kill_agent(run: ElasticRun, _: str) -> None:
    """With its launcher, as when the batch system ends a job."""
    if run.agent.poll() is None:
        run.expected.add(KILLED)
    run.signal_processes(run.agent_host, "KILL", *AGENT)


FAULTS = (
    *(kill_ranks, kill_ranks, kill_launcher, cut_ssh, stop_ranks, lose_host, cut_link),
    *(fill_disk, damage_newest, jump_clock, preempt, kill_agent),
)


def strike(run: ElasticRun, number: int) -> str:
    """A fault at a random time, a third of them as soon as a checkpoint is being written; its name."""
    time.sleep(run.chance.uniform(0, 4))
    deadline = time.monotonic() + (3 if run.chance.random() < 1 / 3 else 0)
    while time.monotonic() < deadline and not any(name.endswith(".partial") for name in os.listdir(run.save)):
        time.sleep(0.001)
    fault, host = run.chance.choice(FAULTS), run.chance.choice(run.in_use())
    print(f"{time.strftime('%H:%M:%S')} fault {number}: {fault.__name__} {host}", flush=True)
    fault(run, host)
    return fault.__name__


def main() -> None:
    """Burst after burst, until there were enough faults."""
    arguments = _parser().parse_args()
    chance, kinds, start = random.Random(arguments.seed), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").mkdir()
        (Path(folder) / "run").mkdir()
        run = ElasticRun(Programs(ROOT, Path(folder) / "data"), Path(folder) / "run", chance, arguments.seed)
        try:
            with run.running():
                while kinds.total() < arguments.faults:
                    run.must_train()
                    for _ in range(min(chance.randint(1, arguments.burst), arguments.faults - kinds.total())):
                        kinds[strike(run, kinds.total() + 1)] += 1
                run.end()
                iterations, differences = run.check()
        finally:
            if arguments.log and run.log.exists():
                shutil.copy(run.log, arguments.log)
        *starts, _ = re.findall(r"launch\.py: elastic: \d+ ranks? on .*", run.log.read_text())
    other = sum("the layout as given" not in line for line in starts)
    print(
        f"seed {arguments.seed}: {kinds.total()} faults in {time.monotonic() - start:.0f} s, {dict(kinds)}; "
        f"{len(starts)} starts, {other} on other layouts; agents ended with {dict(run.codes)}; "
        f"{iterations} iterations, {len(differences)} losses differ{_described(differences)}"
    )
    if max(differences.values(), default=0) > (1e-4 if other else 0):
        sys.exit("losses differ")


def _described(differences: dict[int, float]) -> str:
    return f", from iteration {min(differences)} on, by {max(differences.values()):.1e} at most" if differences else ""


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument("--faults", type=int, default=25, metavar="N", help="faults in all")
    parser.add_argument("--burst", type=int, default=5, metavar="N", help="most faults before it must train again")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the faults, and how the run saves")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep what the agent printed")
    return parser


if __name__ == "__main__":
    run_tool(main)
