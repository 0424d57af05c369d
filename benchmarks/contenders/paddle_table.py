"""PaddlePaddle in one process, static graph: one embedding with all rows and sparse gradients, updated by its Adagrad.

`benchmarks.cluster` measures its parameter server. SGD updates the dense parameters, as in every contender, so
gradients are appended once and two optimizers apply them. Whole and fixed steps are two programs; the fixed block is a
persistent variable, so that no program pays for feeding it. It has no row-wise Adagrad.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.contenders import EPS, LR, RANGE
from benchmarks.train.cases import BOTTOM, DENSE_LR, TOPS
from benchmarks.workload import NUM_DENSE, NUM_FEATURES, SAMPLES, Batches, Floats, RowNumbers, total_rows


class PaddleTrain:
    """The table, and the executor of the programs that use it."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int) -> None:
        if optimizer != "adagrad":
            raise RuntimeError(f"expected the optimizer adagrad for PaddlePaddle, found {optimizer}")
        import paddle

        paddle.enable_static()
        paddle.seed(7)
        self.paddle, self.dim, self.count = paddle, dim, total_rows(rows)
        self.executor = paddle.static.Executor(paddle.CPUPlace())
        self.started: set[str] = set()

    def embedding(self, ids: Any) -> Any:
        """Return rows of the table, which all programs share."""
        attribute = self.paddle.ParamAttr(name="rows", initializer=self.paddle.nn.initializer.Uniform(-RANGE, RANGE))
        size = [self.count, self.dim]
        return self.paddle.static.nn.embedding(ids, size=size, is_sparse=True, param_attr=attribute)

    def start(self, startup: Any) -> None:
        """Initialise a program's variables, except those of the table if another program has initialised them."""
        block = startup.global_block()
        for index in reversed(range(len(block.ops))):
            if self.started.issuperset(block.ops[index].output_arg_names):
                block._remove_op(index)
        self.executor.run(startup)
        created = {name for op in block.ops for name in op.output_arg_names}
        self.started |= {name for name in created if name.startswith("rows")}

    def trainer(self, mode: str, top: str, precision: str) -> "PaddleTrainer":
        if precision != "fp32":
            raise RuntimeError(f"expected the precision fp32 for PaddlePaddle, found {precision}")
        return PaddleTrainer(self, top)

    def prepare_samples(self, batches: Batches) -> list[Any]:
        ids = np.ascontiguousarray(batches.rows.reshape(-1, NUM_FEATURES, SAMPLES).swapaxes(1, 2))
        return [
            {"ids": rows, "dense": dense, "labels": labels[:, None]}
            for rows, dense, labels in zip(ids, batches.dense, batches.labels, strict=True)
        ]

    def probe(self, rows: RowNumbers) -> Floats:
        static = self.paddle.static
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup):
            block = self.embedding(static.data("ids", [None], "int64"))
        self.start(startup)
        return np.array(self.executor.run(main, feed={"ids": rows}, fetch_list=[block])[0], np.float32)


class PaddleTrainer:
    """One model in two programs."""

    def __init__(self, contender: PaddleTrain, top: str) -> None:
        self.contender, self.top = contender, top
        self.whole, self.alone = self._build(fixed=False), self._build(fixed=True)

    def steps(self, batches: Sequence[Any]) -> Iterator[float]:
        return self._run(self.whole, batches)

    def dense_steps(self, batches: Sequence[Any]) -> Iterator[float]:
        return self._run(self.alone, [{name: batch[name] for name in ("dense", "labels")} for batch in batches])

    def _run(self, program: tuple[Any, Any], feeds: Sequence[Any]) -> Iterator[float]:
        main, loss = program
        for feed in feeds:
            yield float(self.contender.executor.run(main, feed=feed, fetch_list=[loss])[0])

    def _build(self, *, fixed: bool) -> tuple[Any, Any]:
        paddle, dim = self.contender.paddle, self.contender.dim
        static = paddle.static
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup):
            dense = static.data("dense", [None, NUM_DENSE], "float32")
            labels = static.data("labels", [None, 1], "float32")
            if fixed:
                shape = [SAMPLES, NUM_FEATURES, dim]
                rows = static.create_global_var(shape, RANGE, "float32", persistable=True)
                rows.stop_gradient = False
            else:
                rows = self.contender.embedding(static.data("ids", [None, NUM_FEATURES], "int64"))
            logits = self._model(dense, rows)
            loss = paddle.nn.functional.binary_cross_entropy_with_logits(logits, labels)
            self._step(loss, [rows] if fixed else [])
        self.contender.start(startup)
        return main, loss

    def _model(self, dense: Any, rows: Any) -> Any:
        paddle, dim = self.contender.paddle, self.contender.dim

        x = self._stack(dense, (NUM_DENSE, *BOTTOM, dim), "relu")
        vectors = paddle.concat([paddle.unsqueeze(x, 1), rows], axis=1)
        count = NUM_FEATURES + 1
        dots = paddle.reshape(paddle.matmul(vectors, vectors, transpose_y=True), [-1, count * count])
        pairs = np.flatnonzero(np.tril(np.ones((count, count)), -1).ravel())
        dots = paddle.gather(dots, paddle.assign(pairs), axis=1)  # its index_select has a slow gradient
        return self._stack(paddle.concat([x, dots], axis=1), (dim + len(pairs), *TOPS[self.top]), None)

    def _stack(self, x: Any, sizes: Sequence[int], last: str | None) -> Any:
        """Append linear layers with a ReLU between each two, initialised as by torch within +-1/sqrt(inputs)."""
        paddle = self.contender.paddle
        for number, (before, after) in enumerate(pairwise(sizes), start=2):
            drawn = paddle.ParamAttr(initializer=paddle.nn.initializer.Uniform(-(before**-0.5), before**-0.5))
            activation = last if number == len(sizes) else "relu"
            x = paddle.static.nn.fc(x, after, weight_attr=drawn, bias_attr=drawn, activation=activation)
        return x

    def _step(self, loss: Any, fixed: list[Any]) -> None:
        """Append gradients once, then SGD for the dense parameters and Adagrad for the table."""
        paddle = self.contender.paddle
        gradients = paddle.static.append_backward(loss)
        dense = [pair for pair in gradients if pair[0].name != "rows"]
        sparse = [pair for pair in gradients if pair[0].name == "rows"]
        if len(sparse) + len(fixed) != 1:
            raise RuntimeError("expected a gradient of the table, found none")
        paddle.optimizer.SGD(DENSE_LR).apply_gradients(dense)
        if sparse:
            # The same names give every program the same state.
            with paddle.utils.unique_name.guard("rows_"):
                paddle.optimizer.Adagrad(LR, epsilon=EPS).apply_gradients(sparse)
