"""Whole training steps of NVIDIA's small DLRM with rows on a device, beside plain PyTorch: three parts of the GPU
benchmark.

26 features of one id, dim 128, SGD, batches of 65,536 samples in host memory, as a loader leaves them. Few batches are
drawn, and used in turn. A table has the rows of these batches, and as many others as can be inserted in some seconds:
`rows` of a record. The peer is the same model on one `EmbeddingBag` with sparse gradients, whose rows are those of all
tables, so that its lookup is fused too; and with 26 of them, each with a lookup and a step (`torch_bags`). So NVIDIA's
ablation is repeated: 16 bits, fused tables and compilation, each with and without the others.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import satrap
from benchmarks.contenders import CAPACITY_SLACK
from benchmarks.gpu.devices import bandwidths, device, finish, sheet_of, sizes
from benchmarks.gpu.roofline import BOTTOM, TOP, direct_sample_of, limits, sample_of
from benchmarks.workload import NUM_DENSE, NUM_FEATURES, hashed_ids, row_numbers, rows_per_feature, total_rows
from satrap.data.inputs import Inputs
from satrap.device.home_memory import DTYPES
from satrap.models import DLRM
from satrap.monitor.memory import memory

DIM, LR, RANGE = 128, 0.1, 0.01
BATCHES, TIER_BATCHES = 4, 32
"""How many batches are drawn: with two tiers so many that rows move in most steps."""
WARMUP, ROUNDS, PROFILED, MOST_STEPS = 4, 3, 10, 40
ROUND_SECONDS = 1.5
FILL_SECONDS = 10.0
"""At most, for rows that no batch names."""
MOST_TRACE_BYTES = 15 << 20
DEVICE_SHARE = 0.75
"""The part of the device's free memory that the rows of the largest model take."""
AMP = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to train."""

    contender: str = "satrap"
    rows: str = "float32"
    """The dtype of the rows."""
    precision: str = "amp-fp16"
    """What the dense network computes in: "fp32", or a name of `AMP`."""
    compiled: bool = False
    staleness: int = 0
    ids: str = "zipf"
    share: float = 1.0
    """The part of the rows that is on the device; the others are at home."""
    is_largest: bool = False
    """Whether there are as many rows as fit on the device and in memory; `share` follows from it."""

    @property
    def has_torch_rows(self) -> bool:
        """Whether plain PyTorch has the rows."""
        return self.contender.startswith("torch")

    @property
    def output_dtype(self) -> Any:
        """The dtype of the rows that the model gets: that of autocast, if it is bfloat16."""
        return "bfloat16" if not self.has_torch_rows and self.precision == "amp-bf16" else "float32"

    @property
    def name(self) -> str:
        """The name of the item."""
        compiled = "compiled" if self.compiled else "eager"
        share = "/largest" if self.is_largest else f"/{self.share:.0%} on the device" if self.share < 1 else ""
        return f"{self.contender}/{self.rows}/{self.precision}/{compiled}/staleness {self.staleness}/{self.ids}{share}"


def with_all(setting: Setting) -> list[Setting]:
    """Return a setting for tables with `num_rows`, for hashed ones and for plain PyTorch."""
    return [replace(setting, contender=contender) for contender in ("satrap_direct", "satrap", "torch")]


def settings() -> list[Setting]:
    """Return all settings of the part, the most important ones first; those that share tables follow one another."""
    base, direct = Setting(), Setting(contender="satrap_direct")
    compiled, fp32 = replace(base, compiled=True), replace(base, precision="fp32")
    return [
        *with_all(compiled),
        *with_all(base),
        *with_all(replace(compiled, ids="uniform")),
        *with_all(fp32),
        *with_all(replace(fp32, compiled=True)),
        *(replace(way, contender="torch_bags") for way in (base, fp32, compiled, replace(fp32, compiled=True))),
        *with_all(replace(compiled, precision="amp-bf16")),
        replace(compiled, staleness=1),
        replace(compiled, staleness=1, ids="uniform"),
        *(
            replace(with_index, compiled=True, rows="float16", staleness=staleness, ids=ids)
            for with_index, staleness in ((direct, 0), (base, 1))
            for ids in ("zipf", "uniform")
        ),
        replace(direct, compiled=True, rows="bfloat16", precision="amp-bf16"),
        replace(compiled, rows="bfloat16", precision="amp-bf16"),
        replace(base, ids="uniform"),
        replace(fp32, ids="uniform"),
    ]


class Step:
    """The dense network and its step, as NVIDIA trains it: SGD, and in half precision with a scaled loss."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.dtype = AMP.get(setting.precision)
        if device().type == "cpu" and self.dtype is not None:
            self.dtype = torch.bfloat16
        self.model: Callable[..., Tensor] = model
        if setting.compiled:
            # Without a GPU the question is only whether the model can be compiled.
            self.model = torch.compile(model, backend="inductor" if device().type == "cuda" else "eager")
        scaled = setting.precision == "amp-fp16" and device().type == "cuda"
        self.scaler = torch.amp.GradScaler(device().type, enabled=scaled)

    def run(self, dense: Tensor, block: Tensor, labels: Tensor, optimizers: Sequence[Any]) -> Tensor:
        """Train on one batch, and return the loss."""
        with torch.autocast(device().type, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            logits = self.model(dense, block)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return loss.detach()


class SatrapTables:
    """26 tables on the device, one for each feature, hashed or with `num_rows`: the latter leave out gradients that are
    not finite, as they add them, since NVIDIA's model checks none."""

    def __init__(self, rows: int, samples: int, setting: Setting, fill_seconds: float) -> None:
        """Insert rows that no batch names, for so many seconds at most; with `num_rows` all exist."""
        self.samples, self.rows_per_feature = samples, rows_per_feature(rows)
        self.is_direct = setting.contender == "satrap_direct"
        how: dict[str, Any] = {"dim": DIM, "dtype": setting.rows, "optimizer": satrap.SGD(lr=LR)}
        if self.is_direct:
            how |= {"num_rows": self.rows_per_feature, "on_nonfinite": "skip"}
        else:
            how["capacity"] = int(self.rows_per_feature * CAPACITY_SLACK) + 1
        tables = [
            satrap.Table(f"c{number}", initial=satrap.Uniform(-RANGE, RANGE), **how) for number in range(NUM_FEATURES)
        ]
        row_bytes = DIM * DTYPES[setting.rows].itemsize
        memory = None if setting.share == 1 else int(setting.share * total_rows(rows)) * row_bytes
        self.embeddings = satrap.Embeddings(
            {table.name: table for table in tables},
            device=device(),
            device_memory=memory,
            staleness=setting.staleness,
            output_dtype=setting.output_dtype,
            seed=1,
        )
        # A stream is trained by an optimizer, even one whose batches are all dropped.
        self.embeddings.optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR))
        until = time.perf_counter() + (0.0 if self.is_direct else fill_seconds)
        with self.embeddings.stream(self._every_row()) as stream:
            for batch in stream:
                del batch  # dropped: its rows are inserted
                if time.perf_counter() > until:
                    break
        finish()

    def num_rows(self) -> int:
        """Return how many rows there are."""
        if self.is_direct:
            return NUM_FEATURES * self.rows_per_feature
        return sum(len(store) for store in self.embeddings.tables.values())

    def moved_rows(self) -> int:
        """Return how many rows were moved to the device so far."""
        return sum(store.stats().get("moved_in", 0) for store in self.embeddings.tables.values())

    def _every_row(self) -> Iterator[Inputs]:
        first = np.arange(NUM_FEATURES)[:, None] * self.rows_per_feature
        for begin in range(0, self.rows_per_feature, self.samples):
            end = min(begin + self.samples, self.rows_per_feature)
            yield self._inputs((first + np.arange(begin, end)[None, :]).reshape(-1))

    def _inputs(self, numbers: Any, dense: Any = None, labels: Any = None) -> Inputs:
        names = self.embeddings.features.names
        size = len(numbers) // NUM_FEATURES
        ids = hashed_ids(numbers)
        if self.is_direct:  # the features' numbers follow one another
            firsts = np.repeat(np.arange(NUM_FEATURES) * self.rows_per_feature, size)
            ids = (numbers - firsts).astype(np.int32)
        return Inputs(names=names, values=ids, batch_size=size, dense=dense, label=labels)

    def steps(self, setting: Setting, batches: Sequence[Any]) -> Iterator[Tensor]:
        """Train without end, and yield the loss of each step."""
        model = DLRM(NUM_DENSE, self.embeddings, bottom=BOTTOM, top=TOP).to(device())
        step = Step(model, setting)
        optimizer = self.embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=LR))
        prepared = [self._inputs(*each) for each in batches]
        with self.embeddings.stream(cycle(prepared)) as stream:
            for batch in stream:
                yield step.run(batch.dense, batch.embeddings, batch.label, [optimizer])


class TorchTables:
    """Plain PyTorch on the same device: all rows in one bag, and the same rows in one for each feature."""

    def __init__(self, rows: int, *_: Any) -> None:
        self.bag = nn.EmbeddingBag(total_rows(rows), DIM, mode="sum", sparse=True, device=device())
        nn.init.uniform_(self.bag.weight, -RANGE, RANGE)
        self.bags = [
            nn.EmbeddingBag.from_pretrained(part, freeze=False, mode="sum", sparse=True)
            for part in self.bag.weight.detach().split(rows_per_feature(rows))
        ]

    def num_rows(self) -> int:
        """Return how many rows there are."""
        return self.bag.num_embeddings

    def moved_rows(self) -> int:
        """Return 0: all rows stay on the device."""
        return 0

    def steps(self, setting: Setting, batches: Sequence[Any]) -> Iterator[Tensor]:
        """Train without end, and yield the loss of each step."""
        features = satrap.Embeddings({f"c{i}": satrap.Table(f"c{i}", dim=DIM) for i in range(NUM_FEATURES)})
        model = DLRM(NUM_DENSE, features, bottom=BOTTOM, top=TOP).to(device())
        step = Step(model, setting)
        is_fused = setting.contender == "torch"
        bags = [self.bag] if is_fused else self.bags
        optimizers = [torch.optim.SGD(part.parameters(), lr=LR) for part in (model, nn.ModuleList(bags))]
        prepared = [(self._ids(numbers, is_fused=is_fused), *others) for numbers, *others in batches]
        for batch in cycle(prepared):
            ids, dense, labels = (torch.from_numpy(array).to(device()) for array in batch)
            blocks = [bag(of_bag).view(len(dense), -1) for bag, of_bag in zip(bags, ids, strict=True)]
            yield step.run(dense, blocks[0] if is_fused else torch.cat(blocks, 1), labels, optimizers)

    def _ids(self, numbers: Any, *, is_fused: bool) -> Any:
        """Return the ids of each bag: sample after sample, and of one bag for all features their rows in turn."""
        by_feature = numbers.reshape(NUM_FEATURES, -1)
        if is_fused:
            return np.ascontiguousarray(by_feature.T).reshape(1, -1, 1)
        return (by_feature - np.arange(NUM_FEATURES)[:, None] * self.bags[0].num_embeddings)[:, :, None]


@cache
def draw_batches(rows: int, ids: str, samples: int, count: int = BATCHES) -> list[tuple[Any, Any, Any]]:
    """Return row numbers, dense numbers and labels of some batches. Zipf's ids take longest, so each has a thread."""
    with ThreadPoolExecutor(min(count, os.cpu_count() or 1)) as pool:
        numbers = list(pool.map(lambda part: row_numbers(rows, ids, 1, part, samples)[0], range(count)))
    rng = np.random.default_rng(1)
    dense = rng.standard_normal((count, samples, NUM_DENSE), np.float32)
    labels = (rng.random((count, samples)) < 0.25).astype(np.float32)
    return list(zip(numbers, dense, labels, strict=True))


class Training:
    """What the parts of whole steps have in common. Settings that follow one another may share their tables."""

    def __init__(self, job: Any) -> None:
        torch.manual_seed(1)
        torch.backends.cuda.matmul.allow_tf32 = True
        self.job = job
        self.rows, self.samples, self.num_batches = sizes().rows, sizes().samples, BATCHES
        self._held: dict[str, tuple[Any, Any]] = {}  # by contender: what its tables depend on, and these
        self._copy: dict[str, float] | None = None

    def tables_of(self, setting: Setting, fill_seconds: float = FILL_SECONDS) -> Any:
        """Return the tables of a setting. The device has those of one setting of each contender at a time."""
        key = (setting.rows, setting.staleness, setting.output_dtype, setting.share, self.rows)
        owner = "torch" if setting.has_torch_rows else setting.contender
        held, tables = self._held.get(owner, (None, None))
        if key != held:
            del tables
            self.release(owner)
            kind = TorchTables if setting.has_torch_rows else SatrapTables
            tables = kind(self.rows, self.samples, setting, fill_seconds)
            self._held[owner] = (key, tables)
        return tables

    def release(self, contender: str = "satrap") -> None:
        """Free the tables of a contender."""
        _, tables = self._held.pop(contender, (None, None))
        if isinstance(tables, SatrapTables):
            tables.embeddings.close()
        del tables
        gc.collect()
        torch.cuda.empty_cache()

    def train(self, setting: Setting, fill_seconds: float = FILL_SECONDS) -> dict[str, Any]:
        """Return the rate of a setting: the median of some rounds, and their range."""
        self._copy = self._copy or bandwidths()
        start = time.perf_counter()
        tables = self.tables_of(setting, fill_seconds)
        steps = tables.steps(setting, draw_batches(self.rows, setting.ids, self.samples, self.num_batches))
        losses = [next(steps) for _ in range(WARMUP)]
        finish()
        prepared = time.perf_counter() - start
        stages, moved = stages_of(tables), tables.moved_rows()
        rates, num_steps = [], 0
        for _ in range(ROUNDS):
            begin, count = time.perf_counter(), 0
            while count < sizes().num_calls or (time.perf_counter() - begin < ROUND_SECONDS and count < MOST_STEPS):
                losses.append(next(steps))
                count += 1
            finish()
            rates.append(self.samples * count / (time.perf_counter() - begin))
            num_steps += count
        steps.close()
        numbers = [float(loss) for loss in losses]
        if not np.isfinite(numbers).all():
            raise FloatingPointError(f"a loss is not finite: {numbers}")
        rate = sorted(rates)[ROUNDS // 2]
        return {
            "samples_per_s": round(rate),
            "range": [round(min(rates)), round(max(rates))],
            "step_ms": round(1e3 * self.samples / rate, 3),
            "samples": self.samples,
            "rows": tables.num_rows(),
            "prepare_s": round(prepared, 2),
            "loss": [round(numbers[0], 5), round(numbers[-1], 5)],
            "moved_rows_per_step": round((tables.moved_rows() - moved) / num_steps),
            "stage_ms": {
                name: round(1e3 * (seconds - stages.get(name, 0.0)) / num_steps, 3)
                for name, seconds in stages_of(tables).items()
            },
            **self._limits(setting, rate),
        }

    def _limits(self, setting: Setting, rate: float) -> dict[str, Any]:
        """Return the samples/s that the measured copies permit, and a data sheet's products if there is one."""
        assert self._copy is not None
        numbers = draw_batches(self.rows, setting.ids, self.samples, self.num_batches)[0][0]
        unique = len(np.unique(numbers)) / self.samples
        sizes_of: dict[str, Any] = {
            "is_half": setting.precision != "fp32",
            "value_bytes": DTYPES[setting.rows].itemsize,
            "output_bytes": DTYPES[setting.output_dtype].itemsize,
        }
        if setting.contender == "satrap_direct":
            sample = direct_sample_of(DIM, unique, **sizes_of)
        else:
            is_checked = setting.contender == "satrap" and setting.precision != "amp-fp16"
            sample = sample_of(DIM, unique, **sizes_of, is_checked=is_checked)
        sheet = sheet_of(torch.cuda.get_device_name()) if device().type == "cuda" else None
        rates: dict[str, float | None] = {"flops": sheet.flops if sheet else None}
        rates |= {"memory": 1e9 * self._copy["copy_gb_per_s"], "bus": 1e9 * self._copy["bus_gb_per_s"]}
        found = limits(sample, rates)
        return {
            "limits": {name: round(limit) for name, limit in found.items()},
            "share_of_limit": round(rate / min(found.values()), 4),
        }


def largest_model(setting: Setting) -> tuple[int, float]:
    """Return how many rows fit on the device and in half of the memory that is free, and the part on the device."""
    if device().type == "cpu":
        return 2 * sizes().rows, 0.5
    (free, _), (used, allowed) = torch.cuda.mem_get_info(), memory()["machine"]
    row_bytes = DIM * DTYPES[setting.rows].itemsize
    on_device, at_home = int(DEVICE_SHARE * free) // row_bytes, (allowed - used) // 2 // row_bytes
    return on_device + at_home, on_device / (on_device + at_home)


def stages_of(tables: Any) -> dict[str, float]:
    """Return the seconds of each stage so far."""
    return dict(tables.embeddings.counters().stages) if isinstance(tables, SatrapTables) else {}


class Steps(Training):
    """The part of whole steps."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self._settings = {setting.name: setting for setting in settings()}
        self.names = list(self._settings)
        self._last_seconds = 0.0

    def measure(self, name: str) -> dict[str, Any]:
        """Train one setting. To compile the network takes longest, so that needs more time than the last item took."""
        setting, start = self._settings[name], time.perf_counter()
        self.job.require_seconds(max(1.3 * self._last_seconds, 40.0 * (setting.compiled and device().type == "cuda")))
        found = self.train(setting)
        self._last_seconds = time.perf_counter() - start
        return found


class Profile(Training):
    """The part that profiles ten steps: a table of kernels, and a trace."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self._setting = Setting(contender="satrap_direct", compiled=True)
        self.names = [self._setting.name]

    def measure(self, name: str) -> dict[str, Any]:
        """Write the table and the trace, which is left out if it is too large."""
        setting = self._setting
        steps = self.tables_of(setting, 0.0).steps(setting, draw_batches(self.rows, setting.ids, self.samples))
        for _ in range(2 * WARMUP):
            next(steps)
        finish()
        with torch.profiler.profile() as profile:
            for _ in range(PROFILED):
                next(steps)
            finish()
        steps.close()
        order = "self_cuda_time_total" if device().type == "cuda" else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=90)
        (self.job.out / "profile.txt").write_text(f"{PROFILED} steps of {name}\n{table}\n")
        trace = self.job.out / "trace.json.gz"
        profile.export_chrome_trace(str(trace))
        size = trace.stat().st_size
        if size > MOST_TRACE_BYTES:
            trace.unlink()
        return {"steps": PROFILED, "trace_bytes": size, "kept": size <= MOST_TRACE_BYTES}


class Tiers(Training):
    """The part with rows in two tiers, at a size that fits the time that is left."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self._settings = {
            setting.name: setting
            for setting in (
                Setting(contender=contender, share=share, ids=ids)
                for contender in ("satrap_direct", "satrap")
                for ids in ("zipf", "uniform")
                for share in (0.5, 0.1)
            )
        }
        largest = Setting(contender="satrap_direct", rows="float16", compiled=True, is_largest=True)
        self._settings[largest.name] = largest
        self.names = list(self._settings)
        self._rows_per_s: float | None = None

    def measure(self, name: str) -> dict[str, Any]:
        """Train with a half or a tenth of the rows on the device. Rows are inserted in a third of the time that is left
        for a setting; a batch has as many samples as leave room for its rows in a quarter of the device's. Of tables
        with `num_rows`, which are divided once, all rows exist."""
        setting = self._settings[name]
        if setting.contender == "satrap_direct":
            self.rows, self.samples, self.num_batches = sizes().rows, sizes().samples, BATCHES
            if setting.is_largest:
                self.rows, share = largest_model(setting)
                setting = replace(setting, share=share)
            found = self.train(setting)
            self.release(setting.contender)
            return found
        self.num_batches = TIER_BATCHES
        if self._rows_per_s is None:
            self._rows_per_s = self._measure_insertions(setting)
        seconds = self.job.seconds_left() / (len(self.names) - self.names.index(name)) / 3
        fits = int(self._rows_per_s * seconds) // NUM_FEATURES * NUM_FEATURES
        self.rows = max(NUM_FEATURES * 200, min(sizes().rows, fits))
        room = int(setting.share * self.rows) // NUM_FEATURES // 4
        self.samples = max(4, min(sizes().samples, room // 4 * 4))
        found = self.train(setting, fill_seconds=2 * seconds)
        self.release()
        return found | {"rows_per_s_inserted": round(self._rows_per_s)}

    def _measure_insertions(self, setting: Setting) -> float:
        """Return how many rows are inserted in a second, from a small table, which also compiles the kernels."""
        self.rows, self.samples = max(NUM_FEATURES * 200, sizes().rows // 16), sizes().samples // 4
        self.tables_of(setting, 0.0)
        self.release()
        start = time.perf_counter()
        inserted = self.tables_of(setting, FILL_SECONDS / 3).num_rows()
        rate = float(inserted / (time.perf_counter() - start))
        self.release()
        return rate
