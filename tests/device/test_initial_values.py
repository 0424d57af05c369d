"""The values and states that new rows begin with: on a device those of the core, bit for bit."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from satrap import _core
from satrap.config.optimizers import SGD, Adagrad, Adam, Ftrl, Optimizer, RowWiseAdagrad
from satrap.config.tables import Constant, Normal, ScaledUniform, Table, Uniform, Zeros
from satrap.device import exact, initial_values
from satrap.device.home_memory import RowLayout
from satrap.device.initial_values import InitialValues
from satrap.table.engine import native_config

INITIALS = {
    "default": Table("t", dim=1).initial,
    "uniform": Uniform(-0.25, 3.0),
    "one value": Uniform(0.5, 0.5),
    "scaled": ScaledUniform(),
    "normal": Normal(mean=-0.3, std=2.0),
    "constant": Constant(0.1),
    "negative": Constant(-70.0),
    "zeros": Zeros(),
}
OPTIMIZERS: list[Optimizer] = [
    SGD(),
    SGD(momentum=0.9),
    Adagrad(initial_accumulator_value=0.3),
    RowWiseAdagrad(initial_accumulator_value=0.1),
    Adam(),
    Ftrl(lr=0.07, beta=1.3, l1=0.01, l2=0.2),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["reference", "triton"])
def initialise(request: pytest.FixtureRequest) -> Any:
    """The kernel: compiled where there is a CUDA device, else interpreted. The interpreter's fma rounds twice, so this
    replaces it by an exact one."""
    if request.param == "reference":
        return initial_values.initialise
    pytest.importorskip("triton")
    from satrap.device import triton_initial

    if not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
            a, b, c = (torch.from_numpy(np.array(each.data)) for each in (x, y, z))
            return TensorHandle(exact.fma(a, b, c).numpy(), z.dtype.scalar)

        request.getfixturevalue("monkeypatch").setattr(InterpreterBuilder, "create_fma", fused)
    return triton_initial.initialise


def of_the_core(table: Table, seed: int, ids: np.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    config = native_config(table, 0)
    engine = _core.Engine([config], seed, 1)
    values = np.empty((len(ids), table.dim), np.float32 if table.dtype == "float32" else np.uint16)
    state = np.empty((len(ids), config.state_dim), np.float32)
    engine.initial_rows(0, ids, values, state)
    as_bits = values.view(np.int32 if table.dtype == "float32" else np.int16)
    return torch.from_numpy(as_bits), torch.from_numpy(state.view(np.int32))


def on_device(
    initialise: Any, table: Table, seed: int, ids: np.ndarray[Any, Any], layout: RowLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of the rows, which are in frames in another order than the ids."""
    n, torch_dtype = len(ids), layout.torch_dtype
    values = torch.full((n + 2, layout.dim), 7.0, dtype=torch_dtype, device=DEVICE)
    state = torch.full((n + 2, layout.state_dim), 7.0, device=DEVICE)
    frames = torch.randperm(n, dtype=torch.int32).to(DEVICE) + 1
    initial = InitialValues.of(table, seed, torch.device(DEVICE))
    initialise(values, state, frames, torch.from_numpy(ids.view(np.int64)).to(DEVICE), initial, layout)
    for rows in (values, state):
        assert (rows[[0, n + 1]] == 7).all(), "another row was written"
    at, bits = frames.long(), torch.int32 if torch_dtype == torch.float32 else torch.int16
    return values[at].view(bits).cpu(), state[at].view(torch.int32).cpu()


@pytest.mark.draw(32)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("initial", INITIALS)
def test_they_have_the_bits_of_the_core(initial: str, dtype: Any, initialise: Any, rng: np.random.Generator) -> None:
    few = "triton" in initialise.__module__ and DEVICE == "cpu"
    for number, optimizer in enumerate(OPTIMIZERS):
        dim = int(rng.choice([1, 5, 16, 64, 100 if few else 300]))
        table = Table(f"a tablé {number}", dim=dim, optimizer=optimizer, initial=INITIALS[initial], dtype=dtype)
        seed = int(rng.integers(2**64, dtype=np.uint64))
        ids = rng.integers(2**64, size=5 if few else 2000, dtype=np.uint64)
        expected = of_the_core(table, seed, ids)
        layout = RowLayout(dtype, dim, expected[1].shape[1])
        found = on_device(initialise, table, seed, ids, layout)
        for there, here in zip(found, expected, strict=True):
            torch.testing.assert_close(there, here, rtol=0, atol=0)


def test_columns_are_those_of_the_whole_row(initialise: Any, rng: np.random.Generator) -> None:
    """A trainer that has some columns of a table draws the numbers of the whole row."""
    ids = rng.integers(2**64, size=30, dtype=np.uint64)
    table = Table("t", dim=11, optimizer=Adagrad(), initial=Normal(std=1.0), shard="columns")
    whole, _ = of_the_core(table, 5, ids)
    found, _ = on_device(initialise, table, 5, ids, RowLayout("float32", 4, 4, first=3))
    assert torch.equal(found, whole[:, 3:7])


def test_rare_draws_of_the_normal_distribution(rng: np.random.Generator) -> None:
    """The tails have another formula: enough numbers that each is drawn."""
    ids = np.arange(20_000, dtype=np.uint64)
    table = Table("t", dim=64, initial=Normal(std=1.0))
    expected, _ = of_the_core(table, 2, ids)
    found, _ = on_device(initial_values.initialise, table, 2, ids, RowLayout("float32", 64, 64))
    assert torch.equal(found, expected)
    assert (found.view(torch.float32).abs() > 4.5).any()


_COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_active_torch_device(self): return torch.device("cpu")
    def get_device_interface(self): return torch.cuda

driver.set_active(Driver())
run, compiled = JITFunction.run, []
JITFunction.run = lambda self, *args, grid, warmup, **how: compiled.append(
    run(self, *args, grid=grid, warmup=True, **how)
)
from satrap.config.tables import Normal, Table
from satrap.device.initial_values import InitialValues
from satrap.device.home_memory import RowLayout
from satrap.device.triton_initial import initialise

initial = InitialValues.of(Table("t", dim=16, initial=Normal()), 1, torch.device("cpu"))
frames, ids = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
initialise(torch.zeros(1, 16), torch.zeros(1, 16), frames, ids, initial, RowLayout("float32", 16, 16))
print(compiled[0].asm["ptx"])
"""


def test_a_compiled_kernel_has_every_constant_in_float64(tmp_path: Path) -> None:
    """Triton rounds some constants to float32, which its interpreter does not."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    found = {struct.unpack(">d", bytes.fromhex(bits))[0] for bits in re.findall(r"0d([0-9A-F]{16})", ran.stdout)}
    expected = {abs(each) for part in (*initial_values.CENTRAL, *initial_values.TAIL) for each in part}
    expected |= {1.0 / k for k in range(21, 0, -2)} | {0.02425, 1.4142135623730951, 0.6931471805599453, 2.0**-32}
    assert expected <= {abs(each) for each in found}
    assert not re.search(r"\.ftz|\.approx|div\.full|fma\.rn\.f64", ran.stdout)
