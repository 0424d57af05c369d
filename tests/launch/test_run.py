"""`satrap run`: a script that knows nothing of servers runs on them, with several trainers; whoever is killed, it ends
in the same bits; and when it is over, nothing of it is left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from async_child import summed
from cluster import stand_still
from runs import (
    DEADLINE_SECONDS,
    JOB,
    SATRAP,
    changed_job,
    finished,
    is_left,
    nothing_is_left,
    num_checkpoints,
    said,
    same,
    scale,
    scaled,
    started,
    until,
)
from satrap.launch.run_loop import folder_of_one_run
from satrap.launch.scaler import Scaler, ask_for
from satrap.launch.supervisor import Event, Wanted

ASYNC = JOB.with_name("async_job.py")


def children(run: subprocess.Popen[str]) -> dict[str, int]:
    """Its processes by name: server 0, trainer 1."""
    found = {}
    for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "trainer" in words:
            found[f"trainer {json.loads(words[words.index('--place') + 1])['rank']}"] = int(pid)
        elif "server" in words:
            found[f"server {words[words.index('--shared') + 1][-1]}"] = int(pid)
        elif "worker" in words:
            found["worker"] = int(pid)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with started(folder, JOB, "--servers", "2", "--trainers", "2", arguments=(str(folder), "160")) as run:
        status, out, err = finished(run)
    assert (status, out) == (0, "began\n"), err
    assert "launch 1: 2 trainers" in err
    nothing_is_left(folder, [])
    with np.load(folder / "end.npz") as found:
        return dict(found)


def test_whoever_is_killed_it_ends_in_the_same_bits(
    tmp_path: Path, seed: int, undisturbed: dict[str, np.ndarray]
) -> None:
    draw = np.random.default_rng(seed)
    options = ("--servers", "2", "--trainers", "2", "--restarts", "100")
    with started(tmp_path, JOB, *options, arguments=(str(tmp_path), "160")) as run:
        for victims in (["server 0", "server 1"], ["trainer 0", "trainer 1"], ["server 0", "trainer 1"]):
            seen = num_checkpoints(tmp_path)
            until(lambda seen=seen: num_checkpoints(tmp_path) > seen + int(draw.integers(3)), run)  # type: ignore[misc]
            os.kill(children(run)[str(draw.choice(victims))], signal.SIGKILL)
        status, _, err = finished(run)
    assert status == 0, err
    assert "was ended by signal 9" in err and re.search(r"launch \d+ goes on after step \d+, from /.*-step-\d+", err)
    same(tmp_path, undisturbed)
    nothing_is_left(tmp_path, [])


def test_a_supervisor_that_is_killed_takes_all_with_it_and_the_next_one_goes_on(
    tmp_path: Path, undisturbed: dict[str, np.ndarray]
) -> None:
    with started(tmp_path, JOB, "--servers", "2", "--trainers", "2", arguments=(str(tmp_path), "160")) as run:
        until(lambda: num_checkpoints(tmp_path) >= 2, run)
        pids = list(children(run).values())
        assert len(pids) == 4
        run.kill()
        run.wait()
    until(lambda: not any(map(is_left, pids)))
    assert list((tmp_path / "memory").iterdir()), "the rows, which the next one removes"
    with started(tmp_path, JOB, "--servers", "3", "--trainers", "2", arguments=(str(tmp_path), "160")) as run:
        status, out, err = finished(run)
    assert (status, out) == (0, "resumed\n"), err
    assert "launch 2: 2 trainers" in err
    same(tmp_path, undisturbed)
    nothing_is_left(tmp_path, [])


def test_more_servers_and_fewer_while_it_trains(tmp_path: Path, undisturbed: dict[str, np.ndarray]) -> None:
    (tmp_path / "hold").touch()
    with started(tmp_path, JOB, "--trainers", "2", arguments=(str(tmp_path), "160")) as run:
        until(lambda: num_checkpoints(tmp_path) >= 1, run)
        for number in (3, 2):
            scaled(tmp_path, run, number)
            if number == 3:
                assert {"server 0", "server 1", "server 2"} <= children(run).keys()
                os.kill(children(run)["server 2"], signal.SIGKILL)
        (tmp_path / "hold").unlink()
        status, _, err = finished(run)
    assert status == 0, err
    same(tmp_path, undisturbed)
    nothing_is_left(tmp_path, [])


def lose(folder: Path, run: subprocess.Popen[str], server: int) -> None:
    """It dies, and its rows are gone, as with a machine."""
    (rows,) = (folder / "memory").glob(f"satrap-*-{server}")
    rows.unlink()
    os.kill(children(run)[f"server {server}"], signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_lost_with_its_rows_after_buckets_have_moved(
    tmp_path: Path, undisturbed: dict[str, np.ndarray], victim: int
) -> None:
    """The others name it still, where it was. It comes back elsewhere, and buckets can move again."""
    script = changed_job(tmp_path, ("step == 30", "step in (30, 60)"))
    (tmp_path / "hold").touch()
    with started(tmp_path, script, "--trainers", "2", arguments=(str(tmp_path), "160")) as run:
        until(lambda: num_checkpoints(tmp_path) >= 1, run)
        scaled(tmp_path, run, 2)
        lose(tmp_path, run, victim)
        said(run, f"server {victim} is no longer where it was: the trainers start again from the last checkpoint")
        said(run, "launch 2: 2 trainers")
        until(lambda: num_checkpoints(tmp_path) >= 12, run)
        scaled(tmp_path, run, 3)
        scaled(tmp_path, run, 1)
        until(lambda: len(list((tmp_path / "memory").iterdir())) == 1, run)  # those that left give their memory back
        (tmp_path / "hold").unlink()
        status, out, err = finished(run)
    assert (status, out) == (0, "began\nresumed\n"), err
    same(tmp_path, undisturbed)
    nothing_is_left(tmp_path, [])


def test_a_server_lost_with_its_rows_while_buckets_move(tmp_path: Path, undisturbed: dict[str, np.ndarray]) -> None:
    """It stands still, so that the move is under way."""
    (tmp_path / "hold").touch()
    with started(tmp_path, JOB, "--trainers", "2", arguments=(str(tmp_path), "160")) as run:
        until(lambda: num_checkpoints(tmp_path) >= 1, run)
        stand_still(children(run)["server 0"])
        scale(tmp_path, 2)
        said(run, "server 1 listens at")
        lose(tmp_path, run, 0)
        said(run, "rows of a server are lost: all servers begin empty")
        said(run, "launch 2: 2 trainers")
        assert {"server 0", "server 1"} <= children(run).keys()
        (tmp_path / "hold").unlink()
        status, out, err = finished(run)
    assert (status, out) == (0, "began\nresumed\n"), err
    same(tmp_path, undisturbed)
    nothing_is_left(tmp_path, [])


def test_workers_read_and_one_is_killed_and_then_a_server_is_lost(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(0), 640
    columns: dict[str, Any] = {name: rng.integers(0, 30, n, dtype=np.uint64) for name in ("user", "item")}
    columns |= {name: rng.standard_normal(n) for name in ("d0", "d1")}
    columns["label"] = rng.integers(0, 2, n).astype(np.float64)
    lists = [rng.integers(0, 30, int(k)).tolist() for k in rng.integers(0, 5, n)]
    pq.write_table(pa.table(columns | {"history": lists}), tmp_path / "data.parquet", row_group_size=80)
    wanted: dict[str, np.ndarray] = {}
    for workers in ("0", "1"):
        folder = tmp_path / workers
        folder.mkdir()
        arguments = (str(folder), "0", "0", str(tmp_path / "data.parquet"))
        if workers == "1":
            (folder / "hold").touch()
        with started(folder, JOB, "--trainers", "2", "--workers", workers, arguments=arguments) as run:
            if workers == "1":
                until(lambda folder=folder: num_checkpoints(folder) >= 2, run)  # type: ignore[misc]
                os.kill(children(run)["worker"], signal.SIGKILL)
                said(run, "worker 0 was ended by signal 9")
                until(lambda folder=folder: num_checkpoints(folder) >= 6, run)  # type: ignore[misc]
                lose(folder, run, 0)
                said(run, "launch 2: 2 trainers")
                (folder / "hold").unlink()
            status, _, err = finished(run)
        assert status == 0, err
        nothing_is_left(folder, [])
        with np.load(folder / "end.npz") as found:
            wanted = wanted or dict(found)
            assert int(found["step"]) == 40 and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_a_trainer_that_is_done_stays_for_what_the_others_save(tmp_path: Path, seed: int) -> None:
    """Without one word of its script; and when one is killed meanwhile, every update is applied once."""
    draw, lengths = np.random.default_rng(seed), [28, 7]
    options = ("--servers", "2", "--trainers", "2")
    for alive in (False, True):
        with started(tmp_path, ASYNC, *options, arguments=(str(tmp_path), "28,7", "4")) as run:
            if not alive:
                until(lambda: num_checkpoints(tmp_path) >= 3, run)
                os.kill(children(run)[f"trainer {draw.integers(2)}"], signal.SIGKILL)
            status, _, err = finished(run)
        assert status == 0, err
    for rank in range(2):
        step, weight = json.loads((tmp_path / f"resumed-{rank}").read_text())
        assert (step, weight) == (28, summed(lengths))


def test_a_trainer_stays_before_its_embeddings_are_closed(tmp_path: Path) -> None:
    """With shares of unequal length, whichever of the two is done first."""
    for name, lengths in (("a", "3,16"), ("b", "16,3")):
        (folder := tmp_path / name).mkdir()
        with started(folder, ASYNC, "--trainers", "2", arguments=(str(folder), lengths, "4", "with")) as run:
            status, _, err = finished(run)
        assert status == 0 and "launch 2" not in err, err
        saved = sorted(each.name.partition("-")[2] for each in (folder / "checkpoints").glob("0*"))
        assert saved == ["step-12", "step-16", "step-4", "step-8"]


def test_a_trainer_that_is_done_outlives_a_save_that_fails(tmp_path: Path) -> None:
    """The first trainer cannot write it; the one that wanted it catches that, and trains on."""
    script = tmp_path / "job.py"
    text = ASYNC.read_text().replace(
        "        run.save(every_steps=every)\n",
        "        away = folder / 'away'\n"
        "        if embeddings.step == 8:\n"
        "            (folder / 'checkpoints').rename(away).with_name('checkpoints').touch()\n"
        "        try:\n"
        "            run.save(every_steps=every)\n"
        "        except CheckpointError:\n"
        "            (folder / 'checkpoints').unlink()\n"
        "            away.rename(folder / 'checkpoints')\n",
    )
    script.write_text(text.replace("import Checkpoint,", "import Checkpoint, CheckpointError,"))
    for name in ("loop.py", "async_child.py"):
        (tmp_path / name).write_text(JOB.with_name(name).read_text())
    with started(tmp_path, script, "--trainers", "2", arguments=(str(tmp_path), "2,16", "4")) as run:
        status, _, err = finished(run)
    assert status == 0 and "no checkpoint was saved: " in err, err
    saved = sorted(each.name.partition("-")[2] for each in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert saved == ["step-12", "step-16", "step-4"]


@pytest.mark.parametrize("victim", ["trainer 0", "server 0"])
def test_a_launch_killed_before_its_first_checkpoint_begins_again(tmp_path: Path, victim: str) -> None:
    """Whether the rows are still there or not; and that all is lost is said."""
    tells = ("optimizer.step()\n", "optimizer.step()\n        print(embeddings.step, flush=True)\n")
    script = changed_job(tmp_path, ("every_steps=5", "every_steps=10**6"), tells)
    with started(tmp_path, script, arguments=(str(tmp_path), "40")) as run:
        assert run.stdout is not None
        assert [run.stdout.readline() for _ in range(4)] == ["began\n", "1\n", "2\n", "3\n"]
        if victim == "server 0":
            lose(tmp_path, run, 0)
        else:
            os.kill(children(run)[victim], signal.SIGKILL)
        status, out, err = finished(run)
    assert status == 0, err
    assert f"{victim} is no longer where it was" in err or "trainer 0 was ended by signal 9" in err
    assert "launch 2 begins at step 0: there was no checkpoint to resume, so all is lost that was trained since" in err
    again = out[out.index("began") :].split()
    assert again == ["began", *map(str, range(1, 41))], "the tables were emptied, too, or the rows would be refused"
    nothing_is_left(tmp_path, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path, number: int) -> None:
    with started(tmp_path, JOB, "--trainers", "2", arguments=(str(tmp_path), "20000", "4")) as run:
        until(lambda: num_checkpoints(tmp_path) >= 1, run)
        pids = list(children(run).values())
        run.send_signal(number)
        status, _, err = finished(run)
    assert status == 130
    assert f"{signal.Signals(number).name}: the run ends" in err
    nothing_is_left(tmp_path, pids)


def test_ended_twice_a_trainer_that_hangs_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import signal, time\nsignal.signal(2, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(999)\n"
    )
    with started(tmp_path, script) as run:
        assert run.stdout is not None and run.stdout.readline() == "deaf\n"
        pids = list(children(run).values())
        run.send_signal(signal.SIGINT)
        assert run.stderr is not None
        while "the run ends" not in run.stderr.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        status, _, _ = finished(run)
    assert status == 130
    nothing_is_left(tmp_path, pids)


def test_a_script_that_fails_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import sys\nprint(sys.argv[1:], __name__, flush=True)\nraise ValueError('a bug')\n")
    with started(tmp_path, script, arguments=("--servers", "x")) as run:
        status, out, err = finished(run)
    assert (status, out) == (1, "['--servers', 'x'] __main__\n")
    assert "ValueError: a bug" in err and "trainer 0 ended with status 1, soon after it began" in err
    for how, wanted in (("7", 7), ("''", 1)):
        script.write_text(f"raise SystemExit({how})\n")
        with started(tmp_path, script) as run:
            assert finished(run)[0] == wanted
    nothing_is_left(tmp_path, [])


def test_runs_in_folders_of_like_names_do_not_meet(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"run#{number}?").mkdir()
    first, second = (tmp_path / f"run#{number}?" for number in (1, 2))
    (first / "hold").touch()
    with started(first, JOB, "--trainers", "2", arguments=(str(first), "80")) as run:
        until(lambda: num_checkpoints(first) >= 1, run)
        assert not [each for each in tmp_path.iterdir() if each.is_file()]
        with started(second, JOB, "--trainers", "2", arguments=(str(second), "40")) as other:
            status, _, err = finished(other)
            assert status == 0, err
        (first / "hold").unlink()
        status, _, err = finished(run)
    assert status == 0, err
    for folder in (first, second):
        nothing_is_left(folder, [])


def test_an_unwrapped_model_is_refused(tmp_path: Path) -> None:
    script = changed_job(tmp_path, ("embeddings.parallel(net)", "net"))
    with started(tmp_path, script, "--trainers", "2", arguments=(str(tmp_path), "40")) as run:
        status, _, err = finished(run)
    assert status == 1
    assert "so their models would part: wrap the model before the optimizer is made" in err


def test_a_checkpoint_that_not_all_trainers_see_is_not_taken_for_none(tmp_path: Path) -> None:
    script = changed_job(tmp_path, ('"checkpoints"', 'f"{embeddings.trainers.rank}/checkpoints"'))
    for attempt in (1, 2):
        with started(tmp_path, script, "--trainers", "2", arguments=(str(tmp_path), "40")) as run:
            status, _, err = finished(run)
        assert status == attempt - 1, err
    assert "some trainers see a checkpoint and others see none; here is " in err, err


def test_compressed_gradients(tmp_path: Path) -> None:
    found = {}
    for how in (None, "float16"):
        folder = tmp_path / str(how)
        folder.mkdir()
        script = changed_job(folder, ("parallel(net)", f"parallel(net, compress={how!r})"))
        with started(folder, script, "--trainers", "2", arguments=(str(folder), "40")) as run:
            status, _, err = finished(run)
        assert status == 0, err
        with np.load(folder / "end.npz") as made:
            found[how] = dict(made)
    for name, values in found[None].items():
        np.testing.assert_allclose(found["float16"][name], values, atol=0.02)
        assert (name == "step") == np.array_equal(found["float16"][name], values), "or nothing was rounded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        ([str(JOB), "--servers", "0"], "run: servers is 0; expected"),
        ([str(JOB), "--max-servers", "0"], "run: max_servers is 0; expected an integer from 1 to"),
        ([str(JOB), "--servers", "3", "--max-servers", "2"], "run: max_servers is 2; expected an integer from 3 to"),
        ([str(JOB), "--max-servers", "2", "--server-gib", "0"], "server-gib is 0.0; wanted a size above 0"),
        ([str(JOB), "--max-servers", "2", "--server-gib", "nan"], "server-gib is nan; wanted"),
        ([str(JOB), "--server-gib", "2"], "there is --server-gib and no --max-servers"),
        ([str(JOB), "--memory", "nowhere"], "memory is 'nowhere'; wanted a folder"),
        ([str(JOB), "--folder", str(JOB)], "cannot be used: "),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    done = subprocess.run([str(SATRAP), "run", *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and message in done.stderr


def test_a_run_that_was_begun_to_outlive_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with started(tmp_path, JOB, arguments=(str(tmp_path), "40")) as run:
            until(lambda: num_checkpoints(tmp_path) >= 1, run)
            run.send_signal(signal.SIGHUP)
            (tmp_path / "hold").unlink()
            status, _, err = finished(run)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert status == 0, err


@pytest.mark.parametrize("reads", ["never", "no more"])
def test_a_run_goes_on_though_nobody_reads_what_it_says(tmp_path: Path, reads: str) -> None:
    script = tmp_path / "job.py"
    script.write_text("for step in range(30):\n    print(step, 'x' * 100_000, flush=True)\nraise SystemExit(7)")
    with started(tmp_path, script) as run:
        assert run.stdout is not None and run.stderr is not None
        if reads == "no more":
            run.stdout.close()
            run.stdout = None
        assert run.wait(DEADLINE_SECONDS) == 7
        told = run.stderr.read()
        shown = run.stdout.read() if run.stdout is not None else ""
    assert "trainer 0 ended with status 7" in told
    assert ("bytes of standard output were not read" in told) == (reads == "never")
    assert len(shown) < 2_000_000
    assert (tmp_path / "run" / "logs" / "trainer-0.log").stat().st_size > 3_000_000


def test_nobody_is_asked_for_servers_who_has_ended(tmp_path: Path) -> None:
    scale = [str(SATRAP), "scale", "--servers", "2", "--folder", str(tmp_path / "run")]
    script = tmp_path / "job.py"
    script.write_text("")
    with started(tmp_path, script) as run:
        assert finished(run)[0] == 0
    told = subprocess.run(scale, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (1, "") and "has ended: start it again with --servers" in told.stderr


def test_orders_of_many_at_once_are_whole(tmp_path: Path) -> None:
    """Whoever comes last is heard, and nobody fails or is heard in part."""
    (tmp_path / "run.json").touch()
    resizer, heard = Scaler(tmp_path), list[Event]()
    with folder_of_one_run(tmp_path):

        def ask() -> None:
            for i in range(100):
                ask_for(tmp_path, 1000 + i)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for each in threads:
            each.start()
        while any(each.is_alive() for each in threads):
            heard += resizer.events()
        heard += resizer.events()
    assert all(isinstance(each, Wanted) and each.servers >= 1000 for each in heard)
    assert isinstance(heard[-1], Wanted) and heard[-1].servers == 1099
    assert not resizer.events()


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    with started(tmp_path, JOB, arguments=(str(tmp_path), "20000", "4")) as run:
        until(lambda: num_checkpoints(tmp_path) >= 1, run)
        with started(tmp_path, JOB) as other:
            status, _, err = finished(other)
        assert status == 1 and "another run is in folder" in err
        run.send_signal(signal.SIGINT)
        assert finished(run)[0] == 130
