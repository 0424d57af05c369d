"""`satrap run`: a script that does not mention servers runs on them, with several trainers. It ends with the same bits
when processes are killed, and leaves nothing behind.
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
from child_processes import SATRAP
from cluster import suspend
from runs import (
    JOB,
    assert_nothing_is_left,
    assert_same_result,
    is_running,
    name_processes,
    num_checkpoints,
    request_scale,
    require_same_end,
    run_to_its_end,
    scale_to,
    start_run,
    wait_for_exit,
    wait_for_output,
    write_changed_job,
)
from satrap.launch.run_events import Event, ScaleRequested
from satrap.launch.run_loop import lock_run_folder
from satrap.launch.scaler import Scaler, request_servers
from waiting import DEADLINE_SECONDS, wait_until

ASYNC = JOB.with_name("async_job.py")
pytestmark = pytest.mark.draw(4)


def children(run: subprocess.Popen[str]) -> dict[str, int]:
    return name_processes(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())


def child(run: subprocess.Popen[str], name: str) -> int:
    """Returns a process of the run, once it is started: it may be about to be, after an earlier kill."""
    wait_until(lambda: name in children(run), run)
    return children(run)[name]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("undisturbed")
    status, out, err = run_to_its_end(folder, JOB, "--servers", "2", "--trainers", "2", arguments=(str(folder), "160"))
    assert (status, out) == (0, "began\n"), err
    assert "launch 1: starting 2 trainers" in err
    assert "satrap run: finished\n" in err, "its script has no Progress, so there is nothing to draw"
    assert_nothing_is_left(folder, [])
    with np.load(folder / "end.npz") as results:
        return dict(results)


def test_a_run_with_killed_processes_ends_with_the_same_bits(
    tmp_path: Path, seed: int, undisturbed: dict[str, np.ndarray]
) -> None:
    draw = np.random.default_rng(seed)
    options = ("--servers", "2", "--trainers", "2", "--restarts", "100")
    with start_run(tmp_path, JOB, *options, arguments=(str(tmp_path), "160")) as run:
        for victims in (["server 0", "server 1"], ["trainer 0", "trainer 1"], ["server 0", "trainer 1"]):
            seen = num_checkpoints(tmp_path)
            wait_until(lambda seen=seen: num_checkpoints(tmp_path) > seen + int(draw.integers(3)), run)  # type: ignore[misc]
            os.kill(child(run, str(draw.choice(victims))), signal.SIGKILL)
        _, err = require_same_end(tmp_path, run, undisturbed)
    assert "was killed by signal 9" in err and re.search(r"launch \d+ continues after step \d+, from /.*-step-\d+", err)


def test_processes_die_with_their_supervisor_and_the_next_run_resumes(
    tmp_path: Path, undisturbed: dict[str, np.ndarray]
) -> None:
    with start_run(tmp_path, JOB, "--servers", "2", "--trainers", "2", arguments=(str(tmp_path), "160")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 2, run)
        pids = list(children(run).values())
        assert len(pids) == 4
        run.kill()
        run.wait()
    wait_until(lambda: not any(map(is_running, pids)))
    assert list((tmp_path / "memory").iterdir()), "the rows, which the next run removes"
    options = ("--servers", "3", "--trainers", "2")
    status, out, err = run_to_its_end(tmp_path, JOB, *options, arguments=(str(tmp_path), "160"))
    assert (status, out) == (0, "resumed\n"), err
    assert "launch 2: starting 2 trainers" in err
    assert_same_result(tmp_path, undisturbed)
    assert_nothing_is_left(tmp_path, [])


def test_scaling_up_and_down_while_training(tmp_path: Path, undisturbed: dict[str, np.ndarray]) -> None:
    (tmp_path / "hold").touch()
    with start_run(tmp_path, JOB, "--trainers", "2", arguments=(str(tmp_path), "160")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 1, run)
        for number in (3, 2):
            scale_to(tmp_path, run, number)
            if number == 3:
                assert {"server 0", "server 1", "server 2"} <= children(run).keys()
                os.kill(child(run, "server 2"), signal.SIGKILL)
        (tmp_path / "hold").unlink()
        require_same_end(tmp_path, run, undisturbed)


def test_scaling_before_the_script_has_embeddings(tmp_path: Path, undisturbed: dict[str, np.ndarray]) -> None:
    """The servers have no job yet: the request waits, and the run ends like any other."""
    start = "    torch.manual_seed(0)\n"
    wait = f"    while (folder / 'first').exists():\n        time.sleep(0.01)\n{start}"
    for name in ("first", "hold"):
        (tmp_path / name).touch()
    script = write_changed_job(tmp_path, (start, wait))
    with start_run(tmp_path, script, "--trainers", "2", arguments=(str(tmp_path), "160")) as run:
        wait_for_output(run, "launch 1: starting 2 trainers")
        request_scale(tmp_path, 2)
        wait_for_output(run, "buckets will be moved once a trainer has created its embeddings")
        (tmp_path / "first").unlink()
        wait_for_output(run, "buckets moved: the run has 2 servers")
        (tmp_path / "hold").unlink()
        require_same_end(tmp_path, run, undisturbed)


def lose_server(folder: Path, run: subprocess.Popen[str], server: int) -> None:
    """Kills a server and removes its rows, as if its machine were lost."""
    (rows,) = (folder / "memory").glob(f"satrap-*-{server}")
    rows.unlink()
    os.kill(child(run, f"server {server}"), signal.SIGKILL)


@pytest.mark.draw(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_lost_with_its_rows_after_buckets_have_moved(
    tmp_path: Path, undisturbed: dict[str, np.ndarray], victim: int
) -> None:
    """The other servers still name the old address. The server comes back at another one, and buckets move again."""
    script = write_changed_job(tmp_path, ("step == 30", "step in (30, 60)"))
    (tmp_path / "hold").touch()
    with start_run(tmp_path, script, "--trainers", "2", arguments=(str(tmp_path), "160")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 1, run)
        scale_to(tmp_path, run, 2)
        lose_server(tmp_path, run, victim)
        wait_for_output(
            run, f"server {victim} came back at another address; restarting the trainers from the last checkpoint"
        )
        wait_for_output(run, "launch 2: starting 2 trainers")
        wait_until(lambda: num_checkpoints(tmp_path) >= 12, run)
        scale_to(tmp_path, run, 3)
        scale_to(tmp_path, run, 1)
        wait_until(
            lambda: len(list((tmp_path / "memory").iterdir())) == 1, run
        )  # servers that left release their memory
        (tmp_path / "hold").unlink()
        out, err = require_same_end(tmp_path, run, undisturbed)
    assert out == "began\nresumed\n", err


def test_a_server_lost_with_its_rows_while_buckets_move(tmp_path: Path, undisturbed: dict[str, np.ndarray]) -> None:
    """Server 0 is suspended, so that the migration is in progress."""
    (tmp_path / "hold").touch()
    with start_run(tmp_path, JOB, "--trainers", "2", arguments=(str(tmp_path), "160")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 1, run)
        suspend(child(run, "server 0"))
        request_scale(tmp_path, 2)
        wait_for_output(run, "server 1: listening at")
        lose_server(tmp_path, run, 0)
        wait_for_output(run, "a server's rows are lost; restarting all servers empty")
        wait_for_output(run, "launch 2: starting 2 trainers")
        assert {"server 0", "server 1"} <= children(run).keys()
        (tmp_path / "hold").unlink()
        out, err = require_same_end(tmp_path, run, undisturbed)
    assert out == "began\nresumed\n", err


def test_workers_read_and_one_is_killed_and_then_a_server_is_lost(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(0), 640
    columns: dict[str, Any] = {name: rng.integers(0, 30, n, dtype=np.uint64) for name in ("user", "item")}
    columns |= {name: rng.standard_normal(n) for name in ("d0", "d1")}
    columns["label"] = rng.integers(0, 2, n).astype(np.float64)
    lists = [rng.integers(0, 30, int(k)).tolist() for k in rng.integers(0, 5, n)]
    pq.write_table(pa.table(columns | {"history": lists}), tmp_path / "data.parquet", row_group_size=80)
    expected: dict[str, np.ndarray] = {}
    for workers in ("0", "1"):
        folder = tmp_path / workers
        folder.mkdir()
        arguments = (str(folder), "0", "0", str(tmp_path / "data.parquet"))
        if workers == "1":
            (folder / "hold").touch()
        with start_run(folder, JOB, "--trainers", "2", "--workers", workers, arguments=arguments) as run:
            if workers == "1":
                wait_until(lambda folder=folder: num_checkpoints(folder) >= 2, run)  # type: ignore[misc]
                os.kill(child(run, "worker"), signal.SIGKILL)
                wait_for_output(run, "worker 0 was killed by signal 9")
                wait_until(lambda folder=folder: num_checkpoints(folder) >= 6, run)  # type: ignore[misc]
                lose_server(folder, run, 0)
                wait_for_output(run, "launch 2: starting 2 trainers")
                (folder / "hold").unlink()
            status, _, err = wait_for_exit(run)
        assert status == 0, err
        assert_nothing_is_left(folder, [])
        with np.load(folder / "end.npz") as results:
            expected = expected or dict(results)
            assert int(results["step"]) == 40 and all(
                np.array_equal(results[name], expected[name]) for name in expected
            )


def test_a_trainer_that_finishes_early_joins_the_others_checkpoints(tmp_path: Path, seed: int) -> None:
    """The script does not mention it. If a trainer is killed meanwhile, every update is still applied once."""
    draw, lengths = np.random.default_rng(seed), [28, 7]
    options = ("--servers", "2", "--trainers", "2")
    for alive in (False, True):
        with start_run(tmp_path, ASYNC, *options, arguments=(str(tmp_path), "28,7", "4")) as run:
            if not alive:
                wait_until(lambda: num_checkpoints(tmp_path) >= 3, run)
                os.kill(child(run, f"trainer {draw.integers(2)}"), signal.SIGKILL)
            status, _, err = wait_for_exit(run)
        assert status == 0, err
    for rank in range(2):
        step, weight = json.loads((tmp_path / f"resumed-{rank}").read_text())
        assert (step, weight) == (28, summed(lengths))


@pytest.mark.draw(2, of="whole runs")
def test_closing_the_embeddings_waits_for_the_others_checkpoints(tmp_path: Path) -> None:
    """The trainers' shares have unequal lengths, in both orders."""
    for name, lengths in (("a", "3,16"), ("b", "16,3")):
        (folder := tmp_path / name).mkdir()
        status, _, err = run_to_its_end(folder, ASYNC, "--trainers", "2", arguments=(str(folder), lengths, "4", "with"))
        assert status == 0 and "launch 2" not in err, err
        saved = sorted(each.name.partition("-")[2] for each in (folder / "checkpoints").glob("0*"))
        assert saved == ["step-12", "step-16", "step-4", "step-8"]


def test_a_trainer_that_finished_early_survives_a_failed_save(tmp_path: Path) -> None:
    """The first trainer cannot write the checkpoint; the one that requested it catches the error and continues."""
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
    for name in ("loop.py", "lean_torch.py", "ledger_invariants.py", "async_child.py"):
        (tmp_path / name).write_text(JOB.with_name(name).read_text())
    status, _, err = run_to_its_end(tmp_path, script, "--trainers", "2", arguments=(str(tmp_path), "2,16", "4"))
    assert status == 0 and "no checkpoint was saved: " in err, err
    saved = sorted(each.name.partition("-")[2] for each in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert saved == ["step-12", "step-16", "step-4"]


@pytest.mark.parametrize("victim", ["trainer 0", "server 0"])
def test_a_launch_killed_before_its_first_checkpoint_starts_at_step_0(tmp_path: Path, victim: str) -> None:
    """With or without the rows of the servers; the run reports that the training so far is lost."""
    print_step = ("optimizer.step()\n", "optimizer.step()\n        print(embeddings.step, flush=True)\n")
    script = write_changed_job(tmp_path, ("every_steps=5", "every_steps=10**6"), print_step)
    with start_run(tmp_path, script, arguments=(str(tmp_path), "40")) as run:
        assert run.stdout is not None
        assert [run.stdout.readline() for _ in range(4)] == ["began\n", "1\n", "2\n", "3\n"]
        if victim == "server 0":
            lose_server(tmp_path, run, 0)
        else:
            os.kill(child(run, victim), signal.SIGKILL)
        status, out, err = wait_for_exit(run)
    assert status == 0, err
    assert f"{victim} came back at another address" in err or "trainer 0 was killed by signal 9" in err
    assert "launch 2 starts at step 0: found no checkpoint to resume, so all training since" in err
    again = out[out.index("began") :].split()
    assert again == ["began", *map(str, range(1, 41))], "the tables were emptied, or the rows would be refused"
    assert_nothing_is_left(tmp_path, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    with start_run(tmp_path, JOB, "--trainers", "2", arguments=(str(tmp_path), "20000", "4")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 1, run)
        pids = list(children(run).values())
        run.send_signal(number)
        status, _, err = wait_for_exit(run)
    assert status == 130
    assert f"{signal.Signals(number).name}: stopping the run" in err
    assert_nothing_is_left(tmp_path, pids)


def test_a_second_ctrl_c_kills_a_trainer_that_hangs(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import signal, time\nsignal.signal(2, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(999)\n"
    )
    with start_run(tmp_path, script) as run:
        assert run.stdout is not None and run.stdout.readline() == "deaf\n"
        pids = list(children(run).values())
        run.send_signal(signal.SIGINT)
        assert run.stderr is not None
        while "stopping the run" not in run.stderr.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        status, _, _ = wait_for_exit(run)
    assert status == 130
    assert_nothing_is_left(tmp_path, pids)


def test_a_script_that_fails_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import sys\nprint(sys.argv[1:], __name__, flush=True)\nraise ValueError('a bug')\n")
    status, out, err = run_to_its_end(tmp_path, script, arguments=("--servers", "x"))
    assert (tmp_path / "run/records/trainer-0.jsonl").read_bytes() == b"\n\n", "the run knows when the script started"
    assert (status, out) == (1, "['--servers', 'x'] __main__\n")
    assert "ValueError: a bug" in err and "trainer 0 exited with status 1, soon after it started" in err
    for how, expected in (("7", 7), ("''", 1)):
        script.write_text(f"raise SystemExit({how})\n")
        assert run_to_its_end(tmp_path, script)[0] == expected
    assert_nothing_is_left(tmp_path, [])


def test_runs_in_directories_with_similar_names_stay_apart(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"run#{number}?").mkdir()
    first, second = (tmp_path / f"run#{number}?" for number in (1, 2))
    (first / "hold").touch()
    with start_run(first, JOB, "--trainers", "2", arguments=(str(first), "80")) as run:
        wait_until(lambda: num_checkpoints(first) >= 1, run)
        assert not [each for each in tmp_path.iterdir() if each.is_file()]
        with start_run(second, JOB, "--trainers", "2", arguments=(str(second), "40")) as other:
            status, _, err = wait_for_exit(other)
            assert status == 0, err
        (first / "hold").unlink()
        status, _, err = wait_for_exit(run)
    assert status == 0, err
    for folder in (first, second):
        assert_nothing_is_left(folder, [])


def test_an_unwrapped_model_is_refused(tmp_path: Path) -> None:
    script = write_changed_job(tmp_path, ("embeddings.parallel(net)", "net"))
    status, _, err = run_to_its_end(tmp_path, script, "--trainers", "2", arguments=(str(tmp_path), "40"))
    assert status == 1
    assert "so their models would diverge: wrap the model before creating the optimizer" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_that_ends_its_script_in_the_loop_of_the_others_is_named_by_all(tmp_path: Path, rank: int) -> None:
    leaves = f"        if (embeddings.trainers.rank, embeddings.step) == ({rank}, 3):\n            return\n"
    clear = "        optimizer.zero_grad()\n"
    script = write_changed_job(tmp_path, (clear, leaves + clear))
    status, _, err = run_to_its_end(tmp_path, script, "--trainers", "2", arguments=(str(tmp_path), "40", "4"))
    assert status == 1
    logs = [(tmp_path / "run" / "logs" / f"trainer-{rank}.log").read_text() for rank in (0, 1)]
    assert all(re.search(rf"StreamError: step 4: .*trainer {rank} ends its stream", log) for log in logs), (err, logs)


def test_a_checkpoint_that_only_some_trainers_see_is_an_error(tmp_path: Path) -> None:
    script = write_changed_job(tmp_path, ('"checkpoints"', 'f"{embeddings.trainers.rank}/checkpoints"'))
    for attempt in (1, 2):
        status, _, err = run_to_its_end(tmp_path, script, "--trainers", "2", arguments=(str(tmp_path), "40"))
        assert status == attempt - 1, err
    assert "some trainers find a checkpoint and others none; this one finds " in err, err


def test_compressed_gradients(tmp_path: Path) -> None:
    results = {}
    for how in (None, "float16"):
        folder = tmp_path / str(how)
        folder.mkdir()
        script = write_changed_job(folder, ("parallel(net)", f"parallel(net, compress={how!r})"))
        status, _, err = run_to_its_end(folder, script, "--trainers", "2", arguments=(str(folder), "40"))
        assert status == 0, err
        with np.load(folder / "end.npz") as loaded:
            results[how] = dict(loaded)
    for name, values in results[None].items():
        np.testing.assert_allclose(results["float16"][name], values, atol=0.02)
        assert (name == "step") == np.array_equal(results["float16"][name], values), "some gradient was rounded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        ([str(JOB), "--servers", "0"], "run: servers is 0; expected"),
        ([str(JOB), "--max-servers", "0"], "run: max_servers is 0; expected an integer from 1 to"),
        ([str(JOB), "--servers", "3", "--max-servers", "2"], "run: max_servers is 2; expected an integer from 3 to"),
        ([str(JOB), "--max-servers", "2", "--server-gib", "0"], "server-gib is 0.0; expected a size above 0"),
        ([str(JOB), "--max-servers", "2", "--server-gib", "nan"], "server-gib is nan; expected"),
        ([str(JOB), "--server-gib", "2"], "--server-gib was given without --max-servers"),
        ([str(JOB), "--memory", "nowhere"], "memory is 'nowhere'; expected a folder"),
        ([str(JOB), "--folder", str(JOB)], "cannot be used: "),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    done = subprocess.run([str(SATRAP), "run", *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and message in done.stderr


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with start_run(tmp_path, JOB, arguments=(str(tmp_path), "40")) as run:
            wait_until(lambda: num_checkpoints(tmp_path) >= 1, run)
            run.send_signal(signal.SIGHUP)
            (tmp_path / "hold").unlink()
            status, _, err = wait_for_exit(run)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert status == 0, err


@pytest.mark.parametrize("reader", ["never", "no more"])
def test_a_run_continues_when_its_output_is_not_read(tmp_path: Path, reader: str) -> None:
    script = tmp_path / "job.py"
    script.write_text("for step in range(30):\n    print(step, 'x' * 100_000, flush=True)\nraise SystemExit(7)")
    with start_run(tmp_path, script) as run:
        assert run.stdout is not None and run.stderr is not None
        if reader == "no more":
            run.stdout.close()
            run.stdout = None
        assert run.wait(DEADLINE_SECONDS) == 7
        stderr = run.stderr.read()
        stdout = run.stdout.read() if run.stdout is not None else ""
    assert "trainer 0 exited with status 7" in stderr
    assert ("bytes of standard output were not read" in stderr) == (reader == "never")
    assert len(stdout) < 2_000_000
    assert (tmp_path / "run" / "logs" / "trainer-0.log").stat().st_size > 3_000_000


def test_a_run_that_has_ended_cannot_be_scaled(tmp_path: Path) -> None:
    command = [str(SATRAP), "scale", "--servers", "2", "--folder", str(tmp_path / "run")]
    script = tmp_path / "job.py"
    script.write_text("")
    assert run_to_its_end(tmp_path, script)[0] == 0
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "") and "has ended; start it again with --servers" in done.stderr


def test_concurrent_scale_requests_are_atomic(tmp_path: Path) -> None:
    """The last request is seen, none fails, and none is read in part."""
    (tmp_path / "run.json").touch()
    scaler, events = Scaler(tmp_path), list[Event]()
    with lock_run_folder(tmp_path):

        def ask() -> None:
            for i in range(100):
                request_servers(tmp_path, 1000 + i)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for each in threads:
            each.start()
        while any(each.is_alive() for each in threads):
            events += scaler.poll()
        events += scaler.poll()
    assert all(isinstance(each, ScaleRequested) and each.servers >= 1000 for each in events)
    assert isinstance(events[-1], ScaleRequested) and events[-1].servers == 1099
    assert not scaler.poll()


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    with start_run(tmp_path, JOB, arguments=(str(tmp_path), "20000", "4")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 1, run)
        status, _, err = run_to_its_end(tmp_path, JOB)
        assert status == 1 and "another run uses folder" in err
        run.send_signal(signal.SIGINT)
        assert wait_for_exit(run)[0] == 130
