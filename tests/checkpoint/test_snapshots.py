"""Snapshots in memory: which hosts may be lost, and a run that resumes from what the others have."""

import errno
import io
import json
import os
import shutil
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.programs import TINY_MODEL, Programs, read_metrics
from support.training import RankTraining, pretrain
from torch.utils._pytree import tree_leaves, tree_structure

from megatron.checkpoint.snapshot_files import (
    START_FILE,
    Shard,
    copy_holders,
    divide,
    make_start_folder,
    newest_complete,
    planned_bytes,
    planned_host_bytes,
    read_shards,
    read_start,
    write_marker,
)
from megatron.checkpoint.tensor_files import read_file
from megatron.cli import parse_run
from megatron.common.errors import CheckpointError, ConfigError, ResourceError
from megatron.tools.cluster.elastic_run import moving
from megatron.training.preflight import check


def shards_after(hosts: Sequence[str], lost: Collection[str], iteration: int = 6) -> list[Shard]:
    """What is left in memory."""
    found = []
    copies = copy_holders(hosts)
    for rank in range(len(hosts)):
        for holder in {rank, copies.get(rank, rank)}:
            if hosts[holder] not in lost:
                first = hosts.index(hosts[holder])
                found.append(Shard(iteration, rank, len(hosts), {"f": (10, "")}, "slot", first))
    return found


@pytest.mark.parametrize(
    ("hosts", "lost", "is_whole"),
    [
        *(("aabbcc", host, True) for host in ("", "a", "b", "c")),
        *(("abbbcc", host, True) for host in ("a", "b", "c")),  # ranks of a host share one of the next, or are spread
        ("aabbcc", "ab", False),
        ("aabbccdd", "ac", True),  # no two neighbors
        ("aabbccdd", "ad", False),  # the last one's neighbor is the first
        ("aa", "", True),
        ("ab", "a", True),
    ],
)
def test_what_is_whole_after_the_loss_of_hosts(hosts: str, lost: str, is_whole: bool) -> None:
    snapshot = newest_complete(shards_after(hosts, lost), 5)
    assert (snapshot is not None) is is_whole
    assert all(hosts[rank] != hosts[holder] for rank, holder in copy_holders(hosts).items())
    if snapshot is not None:
        written = divide(snapshot, hosts)
        assert sorted(shard.rank for shards in written.values() for shard in shards) == list(range(len(hosts)))
        assert not {hosts[rank] for rank in written} & set(lost)
        assert all(hosts[rank] == hosts[shard.host] for rank, shards in written.items() for shard in shards)


def test_the_newest_whole_snapshot() -> None:
    newer = shards_after("aabb", "", 7)
    firsts = [next(shard for shard in newer if shard.host == host) for host in (0, 2)]  # others were killed before
    found = [*shards_after("aabb", ""), *firsts]
    assert newest_complete(found, 5)[3][0].iteration == 6
    assert newest_complete(found, 6) is None, "it is on disk"
    broken = {(0, "slot", 1), (2, "slot", 1)}
    assert newest_complete(found, 5, {(0, "slot", 1)}) and newest_complete(found, 5, broken) is None
    work = divide(newest_complete(found, 5), "aabb")
    assert sorted(map(len, work.values())) == [1, 1, 1, 1], "all ranks write"


def test_shards_that_cannot_be_used(tmp_path: Path) -> None:
    """Only complete ones of the newest start count; the folder must be this user's."""
    folder = tmp_path / "run"
    make_start_folder(folder, "now")
    for iteration in ("3", "4"):
        (folder / "now" / iteration).mkdir()
    (folder / "now" / "3" / "f").write_text("1234")
    shard = Shard(3, 1, 2, {"f": (4, "digest")}, str(folder / "now" / "3"))
    write_marker(shard, folder / "now" / "3")
    assert read_shards(folder, "now") == [shard] and read_shards(folder, "earlier") == read_shards(folder, "") == []
    marker = folder / "now" / "3" / "rank_00001.json"
    whole = json.loads(marker.read_text())
    for changes in (
        {"iteration": "3"},
        {"ranks": 1},
        {"rank": -1},
        {"files": {"../3/f": [4, "digest"]}},
        {"files": [3]},
    ):
        marker.write_text(json.dumps(whole | changes))
        assert read_shards(folder, "now") == [], changes
    marker.write_text(json.dumps(whole))
    for start in ("../run/now", "/etc", "**"):
        (tmp_path / START_FILE).write_text(start)
        assert read_start(tmp_path) == ""
    (folder / "now" / "3" / "f").write_text("123")
    (folder / "now" / "4" / "rank_00000.json").write_text('{"iteration": 3')
    assert read_shards(folder, "now") == []
    make_start_folder(folder, "later")
    assert [path.name for path in folder.iterdir()] == ["later"] and folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(CheckpointError, match="is not a folder of this user: remove it"):
        make_start_folder(tmp_path / "link", "now")


SETTINGS = "--batch-size 2 --gas 2 --eval-iters 0 --pipe-parallel-size 2 --zero-stage 1 --train-iters 9".split()
SAVES = "--save-interval 4 --auto-resume --snapshot-interval 2".split()


class Killed(Exception):
    """Ends a run as a fault would: nothing is saved."""


@contextmanager
def on_own_host(memory: str, **patched: Any) -> Iterator[Path]:
    """Each rank is on a host of its own, whose memory is a folder; ``patched`` are methods of the trainer."""
    from megatron.checkpoint import snapshot_recovery, snapshots
    from megatron.training.trainer import Trainer

    place = Path(memory) / os.environ["RANK"]
    place.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, method in patched.items():
            patch.setattr(Trainer, name, method)
        for module in (snapshots, snapshot_recovery):
            patch.setattr(module, "this_host", lambda: f"host-{os.environ['RANK']} x")
            patch.setattr(module, "snapshot_folder", lambda config: place / "run")
        yield place


def pretrain_on_hosts(words: list[str], memory: str, fails_at: int = 0) -> tuple[str, list[str]]:
    """What this rank printed, and the files that are left in its memory.

    The run fails in iteration ``fails_at``, when its last snapshot is complete.
    """
    from megatron.training.trainer import Trainer

    step, output = Trainer._step, ""

    def failing_step(trainer, iteration, batches):
        if iteration == fails_at:
            trainer.snapshots.finish()
            raise Killed
        return step(trainer, iteration, batches)

    with on_own_host(memory, _step=failing_step) as place:
        with suppress(Killed):
            output = pretrain(words)[1]
        return output, sorted(path.name for path in place.rglob("*") if path.is_file())


def select_on_hosts(words: list[str], memory: str) -> tuple[str | None, str]:
    """The checkpoint that a run resumes, and what this rank printed."""
    from megatron.checkpoint.snapshot_recovery import select_newest
    from megatron.launch.distributed import distributed
    from megatron.training.preflight import check

    run, _ = check(parse_run(words, os.environ))
    with on_own_host(memory), distributed(run.parallel), redirect_stdout(io.StringIO()) as output:
        saved = select_newest(run, None)
        return saved and saved.tag, output.getvalue()


@pytest.fixture(scope="module")
def words(programs: Programs) -> list[str]:
    return [*TINY_MODEL, *programs.data_arguments, *SETTINGS, *SAVES]


@pytest.fixture(scope="module")
def failed(run_ranks_once, words: list[str], tmp_path_factory) -> Path:
    """A run that has failed in iteration 8: checkpoints in ``ck``, and in ``memory`` that of its hosts."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "memory").mkdir()
    own = ["--save", str(folder / "ck"), "--snapshot-dir", str(folder), "--metrics-file", str(folder / "metrics")]
    left = [files for _, files in run_ranks_once(2, pretrain_on_hosts, [*words, *own], str(folder / "memory"), 8)]
    assert left[0] == left[1] and left[0].count("rank_00000.json") == left[0].count("rank_00001.json") == 1
    assert (folder / "ck" / "latest").read_text() == "global_step4", "iterations 5 to 7 are not on disk"
    return folder


def test_a_run_resumes_from_the_memory_of_the_other_host(
    train_in_ranks: RankTraining, run_ranks_once, programs: Programs, words, failed: Path, tmp_path: Path
) -> None:
    train_in_ranks(2, *SETTINGS, "--metrics-file", tmp_path / "whole")
    folder = shutil.copytree(failed, tmp_path / "run")
    shutil.rmtree(folder / "memory" / "0")  # the host of rank 0 is lost
    metrics, save = folder / "metrics", folder / "ck"
    own = ["--save", str(save), "--snapshot-dir", str(folder), "--metrics-file", str(metrics)]
    output, files = run_ranks_once(2, pretrain_on_hosts, [*words, *own], str(folder / "memory"))[0]
    assert "> the snapshot of iteration 6: saved as global_step6, from the memory of host-1\n" in output
    assert "resuming after iteration 6" in output
    assert files == [] and not (save / ".snapshots").exists(), "a run that ends leaves nothing in memory"
    trained = [line["iteration"] for line in read_metrics(metrics)]
    assert trained == [*range(1, 8), 7, 8, 9], "no more than two iterations are repeated"
    assert losses(metrics) == losses(tmp_path / "whole")
    proof = programs.warm(1, "tools/audit_data.py", "proof", "--load", save, "--metrics-file", metrics).ok()
    assert proof.output.endswith("proven: no sample was repeated, none was skipped\n")


@pytest.mark.parametrize(
    ("lost", "damaged", "start", "tag", "text"),
    [
        ("01", "", "brought", "global_step6", "> the snapshot of iteration 6: saved as global_step6, from the memory"),
        ("", "0", None, "global_step6", "> warning: the snapshot of iteration 6: "),  # but for the copy
        ("0", "1", None, "global_step4", "> the snapshot of iteration 6 is not complete on the hosts that are left"),
        ("01", "", None, "global_step4", ""),
        ("", "", "another", "global_step4", ""),  # as after the first checkpoint of a run that was begun anew
        ("", "", "removed", None, "> the snapshots in memory are not used: "),
    ],
    ids=[
        "both hosts idle",
        "own shard damaged",
        "both shards lost",
        "both hosts lost",
        "of another start",
        "all removed",
    ],
)
def test_what_a_run_resumes(run_ranks, words, failed: Path, tmp_path: Path, lost, damaged, start, tag, text) -> None:
    folder = shutil.copytree(failed, tmp_path / "run")
    if start == "brought":
        for host in lost:
            command = moving(folder / "memory" / host / "run", folder / "ck", f"host-{host}")
            subprocess.run(command, check=True)
    for host in lost:
        shutil.rmtree(folder / "memory" / host)
    if damaged:  # rank 0's shard
        (file,) = (folder / "memory" / damaged).glob("run/*/6/*mp_rank_00_optim_states.pt")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    if start == "another":
        (folder / "ck" / ".snapshots").write_text(start)
    if start == "removed":  # with rm -r ck/*, which leaves what begins with a dot
        subprocess.run(f"rm -r {folder}/ck/*", shell=True, check=True)
    own = ["--save", str(folder / "ck"), "--snapshot-dir", str(folder), "--keep-last", "1"]
    (found, output), _ = run_ranks(2, select_on_hosts, [*words, *own], str(folder / "memory"))
    assert found == tag and text in output and bool(text) is bool(output)
    assert [path.name for path in (folder / "ck").glob("global_step*[0-9]")] == [tag for tag in [tag] if tag]
    assert ("is damaged: its hash differs" in output) is bool(damaged)


def test_snapshots_that_cannot_be_brought_to_the_disk_stay(tmp_path: Path) -> None:
    (memory := tmp_path / "memory").mkdir()
    (memory / "f").write_text("1234")
    (save := tmp_path / "ck").write_text("no folder")
    command = moving(memory, save, "a")
    assert subprocess.run(command, capture_output=True).returncode != 0 and (memory / "f").exists()
    save.unlink()
    save.mkdir()
    for _ in range(2):  # the second time there is nothing in memory
        subprocess.run(command, check=True)
        assert not memory.exists() and (save / ".memory-of-a" / "f").read_text() == "1234"


def kept_in_memory(words: list[str], memory: str) -> list[Any]:
    """Iterations and ranks of the shards on this host, after each of several snapshots; and what was logged."""
    from megatron.checkpoint import snapshots

    number, seen, logged = int(os.environ["RANK"]), [], list[str]()

    def collect(iteration, skipped_samples, path, files):
        state = torch.full((1000,), float(iteration + number))
        return [(path / f"of_{number}.pt", {"weights": state})]

    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with on_own_host(memory) as place:
        taken = snapshots.Snapshots(
            SimpleNamespace(collect=collect, engine=SimpleNamespace()), parse_run(words, os.environ), logged.append
        )

        def look() -> None:
            taken.finish()
            found = read_shards(place / "run", taken._folder.name)
            for shard in found:
                content = torch.load(Path(shard.folder) / f"of_{shard.rank}.pt", weights_only=True)
                assert (content["weights"] == shard.iteration + shard.rank).all()
            seen.append(sorted((shard.iteration, shard.rank) for shard in found))

        taken.take(1)
        look()
        for step in ("write_files", "_messages", "write_marker"):
            with pytest.MonkeyPatch.context() as fault:
                if number == 1:
                    fault.setattr(snapshots, step, failing)
                taken.take(2)
                look()
        for iteration in (3, 4):
            taken.take(iteration)
            look()
        taken.discard()
        look()
        taken.take(5)
        look()
        (of_another := place / "run" / "other").mkdir()
        taken.remove()
        left = os.listdir(place / "run")
        of_another.rmdir()
        taken.remove()
        return [*seen, left, (place / "run").exists(), logged[1:]]


def test_a_snapshot_that_fails_leaves_the_one_before(run_ranks_once, words, tmp_path: Path) -> None:
    """Rank 1 cannot write its files, map files into memory, or mark them as complete."""
    (tmp_path / "ck").mkdir()
    own = ["--save", str(tmp_path / "ck"), "--snapshot-dir", str(tmp_path)]
    for seen in run_ranks_once(2, kept_in_memory, [*words, *own], str(tmp_path)):
        *seen, left, exists, logged = seen  # noqa: PLW2901
        both = [[(iteration, 0), (iteration, 1)] for iteration in range(6)]
        assert seen == [both[1], *[both[1]] * 3, both[3], both[4], [], both[5]]
        assert left == ["other"] and not exists, "another run that has taken the folder over keeps its snapshots"
        assert len(logged) == 3
        for warning in logged:
            assert warning.startswith("  warning: the snapshot of iteration 2 cannot be written to ")
            assert warning.endswith(" (No space left on device); training continues without it")


def losses(metrics: Path) -> list[float]:
    return list({line["iteration"]: line["lm_loss"] for line in read_metrics(metrics)}.values())


def test_memory_is_checked_before_the_start(words, failed: Path, tmp_path: Path, monkeypatch) -> None:
    """Two snapshots of each rank, and on two hosts as much again."""
    environ = {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "2"}
    save = ["--save", str(tmp_path / "ck"), "--snapshot-dir"]
    run, _ = check(parse_run([*words, *save, str(tmp_path)], environ))
    assert planned_host_bytes(run, 1) == 2 * sum(planned_bytes(run)) == planned_host_bytes(run, 2)
    taken = [sum(file.stat().st_size for file in (failed / "memory" / host).rglob("*.pt")) for host in "01"]
    assert taken[0] == taken[1] and 0.85 < planned_host_bytes(run, 1) / (2 * taken[0]) < 1.15
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    with pytest.raises(ResourceError, match="the two snapshots of 2 ranks .* take up to .* MB, and 100 kB are free in"):
        check(run)
    with pytest.raises(ConfigError, match="none: no folder to write in; name one in memory"):
        check(parse_run([*words, *save, str(tmp_path / "none")], environ))


def vars_of(leaf: Any) -> Any:
    return vars(leaf) if type(leaf).__module__.startswith("deepspeed") and hasattr(leaf, "__dict__") else leaf


def train_and_keep(words: list[str]) -> int:
    """Train, and leave the snapshots in memory."""
    from megatron.checkpoint.snapshots import Snapshots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshots, "remove", Snapshots.finish)
        return pretrain(words)[0]


@pytest.mark.parametrize(
    "layout",
    [
        "--model-parallel-size 2",
        "--zero-stage 3 --bf16",
        "--zero-stage 2 --num-experts 2 --expert-model-parallel-size 2",
    ],
)
def test_a_snapshot_has_what_a_checkpoint_has(run_ranks_once, programs: Programs, tmp_path: Path, layout: str) -> None:
    """While the same state is written to disk in the background; both engines, and every ZeRO stage in other tests."""
    words = [*TINY_MODEL, *programs.data_arguments, *layout.split(), "--batch-size", "4", "--train-iters", "3"]
    words += ["--eval-iters", "0", "--save-interval", "1", "--async-save", "--auto-resume", "--snapshot-interval", "1"]
    words += ["--save", str(tmp_path / "ck"), "--snapshot-dir", str(tmp_path)]
    assert run_ranks_once(2, train_and_keep, words) == [0, 0]
    (start,) = tmp_path.glob("megatron-*/*")
    assert {shard.iteration for shard in read_shards(start.parent, start.name)} == {2}
    folders = tmp_path / "ck" / "global_step2", start / "2"
    names, of_snapshot = ({path.name for path in folder.glob("*.pt")} for folder in folders)
    assert names == of_snapshot
    for name in sorted(names):
        saved, kept = (read_file(folder / name) for folder in folders)
        assert tree_structure(kept) == tree_structure(saved)
        for one, other in zip(tree_leaves(kept), tree_leaves(saved), strict=True):
            is_tensor = isinstance(other, torch.Tensor)
            assert torch.equal(one, other) if is_tensor else vars_of(one) == vars_of(other)
