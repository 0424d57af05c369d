"""Paddle's parameter server, in its environment: one round, and each of its two processes, `python -m
benchmarks.cluster.paddle JOB`. Environment variables name the role of a process, as Paddle's fleet requires.

Asynchronous mode, one sparse table with row-wise Adagrad (SparseAdaGradSGDRule) on the server. The trainer's program is
an embedding of [ids, 1] row numbers and, for the kind `rows`, a loss whose gradient is the same for every number; for
`train` the light DLRM. `Executor.run` never fetches the dense parameters, which the server updates, so the trainer
fetches them before every step. Pending pushes are flushed before the clock stops.

Pending pushes are merged, and at dim 64 a merged one exceeds the 64 MiB of a message of Paddle's RPC. The server
refuses it, the trainer retries three times and drops it: the rows stay unchanged, and only a line on stderr says so. No
option of Paddle changes this limit, so it is raised in the library's memory.
"""

import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.cluster import GRADIENT, TOP, ids_of, samples_of
from benchmarks.cluster.processes import Process, wait_or_kill
from benchmarks.contenders import RANGE
from benchmarks.harness.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.harness.machine import ROOT
from benchmarks.train.pairs import first_and_last
from benchmarks.workload import (
    BATCH_IDS,
    BOTTOM,
    DENSE_LR,
    NUM_DENSE,
    NUM_FEATURES,
    SAMPLES,
    TOPS,
    RowNumbers,
    total_rows,
)

START_SECONDS = 120.0
RUN_SECONDS = 1500.0
HOST = "127.0.0.1"
DROPPED = "resquest cmd_id"  # sic: the start of its client's line about a message that it dropped
LR = 0.05
TABLE = "rows"
MESSAGE_LIMIT = "_ZN4brpc5fLU6419FLAGS_max_body_sizeE"
MESSAGE_BYTES = 1 << 30
Feed = dict[str, Any]


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]


def environment(role: str, ports: tuple[int, int], num_threads: int) -> dict[str, str]:
    """Return what Paddle's fleet reads: the role of the process, and the addresses of server and trainer."""
    server, trainer = ports
    return {
        "TRAINING_ROLE": role,
        "PADDLE_PORT": str(server if role == "PSERVER" else trainer),
        "PADDLE_PSERVERS_IP_PORT_LIST": f"{HOST}:{server}",
        "PADDLE_TRAINER_ENDPOINTS": f"{HOST}:{trainer}",
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_TRAINER_ID": "0",
        "PADDLE_WITH_GLOO": "0",
        "POD_IP": HOST,
        "FLAGS_START_PORT": "0",
        "GLOG_v": "0",
        "CPU_NUM": "1",
        "OMP_NUM_THREADS": str(num_threads),
    }


def start(role: str, job: Mapping[str, Any], ports: tuple[int, int]) -> Process:
    """Start a process of one role. The output of a server is not read."""
    unread = subprocess.DEVNULL if role == "PSERVER" else subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cluster.paddle", json.dumps(job)],
        cwd=ROOT,
        env={**os.environ, **environment(role, ports, job["num_threads"])},
        stdout=unread,
        stderr=unread,
        text=True,
    )


def await_port(process: Process, port: int) -> None:
    """Wait until the server listens."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"Paddle's server exited with status {process.returncode} before it listened")
        try:
            socket.create_connection((HOST, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"Paddle's server does not listen after {START_SECONDS:g} s")


def result_of(stdout: str) -> dict[str, Any] | None:
    """Return the trainer's last line that is a result, None without one; Paddle prints other lines."""
    results = [line for line in stdout.splitlines() if line.startswith('{"streams"')]
    result: dict[str, Any] | None = json.loads(results[-1]) if results else None
    return result


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one round. A trainer that fails after its result, in Paddle's teardown, has been measured."""
    first, second = free_ports(2)
    with ExitStack() as stack:
        server = start("PSERVER", job, (first, second))
        stack.callback(wait_or_kill, server, 5)
        await_port(server, first)
        trainer = start("TRAINER", {**job, "server": server.pid}, (first, second))
        stack.callback(wait_or_kill, trainer, 5)
        try:
            stdout, stderr = trainer.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            trainer.kill()
            stdout, stderr = trainer.communicate()
            stderr += f"\nstill running after {RUN_SECONDS:g} s"
    result = result_of(stdout)
    if result is None:
        raise RuntimeError(f"Paddle's trainer gave no result: {' | '.join(stderr.strip().splitlines()[-3:])}")
    if DROPPED in stderr:
        raise RuntimeError("Paddle's trainer dropped messages, so its server did not do all the work")
    return result


class Model:
    """The layers of the DLRM, in the caller's program."""

    def __init__(self, paddle: Any, dim: int) -> None:
        self.paddle, self.dim = paddle, dim

    def loss(self, rows: Any) -> Any:
        """rows: [any, 26, dim]."""
        paddle = self.paddle
        dense = paddle.static.data("dense", [None, NUM_DENSE], "float32")
        labels = paddle.static.data("labels", [None, 1], "float32")
        x = self._stack(dense, (NUM_DENSE, *BOTTOM, self.dim), "relu")
        vectors = paddle.concat([paddle.unsqueeze(x, 1), rows], axis=1)
        count = NUM_FEATURES + 1
        dots = paddle.reshape(paddle.matmul(vectors, vectors, transpose_y=True), [-1, count * count])
        pairs = np.flatnonzero(np.tril(np.ones((count, count)), -1).ravel())
        dots = paddle.gather(dots, paddle.assign(pairs), axis=1)  # its index_select has a slow gradient
        logits = self._stack(paddle.concat([x, dots], axis=1), (self.dim + len(pairs), *TOPS[TOP]), None)
        return paddle.nn.functional.binary_cross_entropy_with_logits(logits, labels)

    def _stack(self, x: Any, sizes: Sequence[int], last: str | None) -> Any:
        """Append linear layers with a ReLU between each two, initialised as by torch within +-1/sqrt(inputs)."""
        paddle = self.paddle
        for number, (before, after) in enumerate(pairwise(sizes), start=2):
            drawn = paddle.ParamAttr(initializer=paddle.nn.initializer.Uniform(-(before**-0.5), before**-0.5))
            activation = last if number == len(sizes) else "relu"
            x = paddle.static.nn.fc(x, after, weight_attr=drawn, bias_attr=drawn, activation=activation)
        return x


def sparse_table(dim: int) -> dict[str, Any]:
    """Return the server's table for `DistributedStrategy.sparse_table_configs`."""
    prefix = f"table_parameters.{TABLE}."
    accessor = f"{prefix}accessor."
    config: dict[str, Any] = {
        f"{prefix}table_class": "MemorySparseTable",
        f"{accessor}accessor_class": "SparseAccessor",
        f"{accessor}fea_dim": dim + 2,
        f"{accessor}embedx_dim": dim - 1,
        f"{accessor}embedx_threshold": 0,
    }
    for part in ("embed", "embedx"):  # a row's first number, and the others
        rule = f"{accessor}{part}_sgd_param."
        config |= {
            f"{rule}name": "SparseAdaGradSGDRule",
            f"{rule}adagrad.learning_rate": LR,
            f"{rule}adagrad.initial_range": RANGE,
            f"{rule}adagrad.initial_g2sum": 3.0,  # its default
        }
    return {TABLE: config}


def raise_message_limit() -> None:
    """Raise the size limit of messages (see above); must precede the first message."""
    from paddle.base import libpaddle

    ctypes.c_uint64.in_dll(ctypes.CDLL(libpaddle.__file__), MESSAGE_LIMIT).value = MESSAGE_BYTES


def build(paddle: Any, fleet: Any, job: Mapping[str, Any]) -> Any:
    """Build the loss with its optimizer in the default program; return the loss."""
    dim = job["dim"]
    attribute = paddle.ParamAttr(name=TABLE, initializer=paddle.nn.initializer.Uniform(-RANGE, RANGE))
    ids = paddle.static.data("ids", [None, 1], "int64")  # the only shape that this mode accepts
    block = paddle.static.nn.sparse_embedding(ids, size=[total_rows(job["rows"]), dim], param_attr=attribute)
    if job["kind"] == "train":
        loss = Model(paddle, dim).loss(paddle.reshape(block, [-1, NUM_FEATURES, dim]))
    else:
        loss = paddle.sum(block) * GRADIENT
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.sparse_table_configs = sparse_table(dim)
    # SGD is for the dense parameters; the table has its own rule.
    fleet.distributed_optimizer(paddle.optimizer.SGD(DENSE_LR), strategy).minimize(loss)
    return loss


def by_sample(rows: RowNumbers) -> RowNumbers:
    """Return [ids, 1], sample after sample, for ids that are feature after feature."""
    return np.ascontiguousarray(rows.reshape(NUM_FEATURES, -1).T).reshape(-1, 1)


def feeds(job: Mapping[str, Any]) -> list[Feed]:
    """Return the batches of the round."""
    if job["kind"] == "train":
        batches = samples_of(job, "satrap")
        return [
            {"ids": by_sample(rows), "dense": dense, "labels": labels[:, None]}
            for rows, dense, labels in zip(batches.rows, batches.dense, batches.labels, strict=True)
        ]
    return [{"ids": rows.reshape(-1, 1)} for rows in ids_of(job)]


def filling(job: Mapping[str, Any], like: Feed) -> Iterator[Feed]:
    """Yield batches with every row once. The dense numbers are 0, so only biases learn from them."""
    count = total_rows(job["rows"])
    for begin in range(0, count, BATCH_IDS):
        rows = np.arange(begin, min(begin + BATCH_IDS, count)).reshape(-1, 1)
        samples = len(rows) // NUM_FEATURES
        yield {"ids": rows} | {name: np.zeros_like(like[name][:samples]) for name in like if name != "ids"}


class Steps:
    """Training steps in the worker of a fleet."""

    def __init__(self, paddle: Any, fleet: Any, loss: Any, *, has_dense: bool) -> None:
        from paddle.distributed.ps.utils.public import get_the_one_recv_context

        self._executor = paddle.static.Executor(paddle.CPUPlace())
        self._executor.run(paddle.static.default_startup_program())
        fleet.init_worker()
        self._program, self._loss = paddle.static.default_main_program(), loss
        self._scope = paddle.static.global_scope()
        self._runtime = fleet.fleet._runtime_handle
        self._places = get_the_one_recv_context(self._runtime.context, split_dense_table=False) if has_dense else None
        self.flush: Callable[[], Any] = self._runtime._worker.client_flush

    def run(self, batches: Iterable[Feed]) -> tuple[list[float], list[float]]:
        """Run the batches; return the seconds and the loss of each."""
        seconds, losses = [], []
        for feed in batches:
            start = time.perf_counter()
            if self._places is not None:
                self._runtime._pull_all_dense([self._scope], self._runtime._send_ctx, self._places)
            loss = self._executor.run(self._program, feed=feed, fetch_list=[self._loss])[0]
            losses.append(float(np.asarray(loss).ravel()[0]))
            seconds.append(time.perf_counter() - start)
        return seconds, losses


def train(job: Mapping[str, Any], steps: Steps, version: str) -> dict[str, Any]:
    """Create every row, warm up, then time the steps with the flush of their pushes."""
    batches, num_warmup, num_steps = feeds(job), job["num_warmup"], job["num_steps"]
    server = job["server"]
    steps.run(filling(job, batches[0]))
    steps.flush()
    _, losses = steps.run(batches[:num_warmup])
    steps.flush()
    before = read_cpu([server])
    start = time.perf_counter()
    seconds, more = steps.run(batches[num_warmup:])
    steps.flush()
    total = time.perf_counter() - start
    figures = {
        "step_ms": round(1e3 * statistics.median(seconds), 3),
        "flush_ms": round(1e3 * (total - sum(seconds)), 3),
        **first_and_last([*losses, *more]),
        **noise_between(before, read_cpu([server])),
    }
    if job["kind"] == "train":
        figures["samples_per_s"] = round(SAMPLES * num_steps / total)
    else:
        figures["rows_per_s"] = round(BATCH_IDS * num_steps / total)
    return {
        "streams": {f"{job['kind']}:paddle": figures},
        "peak_resident_bytes": peak_resident_bytes([server]),
        "versions": {"paddlepaddle": version},
    }


def main() -> None:
    import paddle
    from paddle.distributed import fleet

    job = json.loads(sys.argv[1])
    raise_message_limit()
    paddle.enable_static()
    paddle.seed(7)
    fleet.init(fleet.PaddleCloudRoleMaker(is_collective=False), is_collective=False)
    loss = build(paddle, fleet, job)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    steps = Steps(paddle, fleet, loss, has_dense=job["kind"] == "train")
    print(json.dumps(train(job, steps, str(paddle.__version__))), flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
