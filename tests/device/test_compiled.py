"""Every kernel of rows on a device, compiled as it is launched for an A100 (sm_80) and an H100 (sm_90); no device is
needed. Triton's interpreter, in which the other tests run kernels, sees neither what does not compile nor what it
costs.

A kernel may not spill, touch local memory, or flush, approximate or contract what its formula does not; it reads and
writes rows by 16 bytes where their dim allows it; and its instructions have a budget. Each run compiles all kernels for
one dim, which is drawn, and those of the table in docs/internals/004-device.md. `make test ALL=1` compiles all dims,
also with the Triton that torch 2.11 brings. build/triton keeps what was compiled before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_kernels import OLDER, TARGETS, Compilers, Kernel, Launch, compilers

pytest.importorskip("triton")

DTYPES = ("float32", "float16", "bfloat16")
DIMS = (16, 64, 128, 37)
OPTIMIZERS = ("SGD", "momentum", "Nesterov", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "Ftrl")
ALL_OPTIONS = ("factors", "scaled", "skip")
NOTE = Path(__file__).parents[2] / "docs/internals/004-device.md"

BUDGETS: dict[str, tuple[int, int]] = {
    #                 float32  16 bits
    "pool": (220, 280),
    "pool bags": (900, 1250),
    "sequence": (280, 280),
    "exchange": (1020, 940),
    "uniform": (460, 530),
    "normal": (1070, 1280),
    "constant": (190, 190),
    "SGD": (370, 930),
    "momentum": (450, 1130),
    "Nesterov": (470, 1150),
    "Adagrad": (1000, 1800),
    "RowWiseAdagrad": (760, 1210),
    "Adam": (1700, 2340),
    "AdamW": (1700, 2360),
    "Ftrl": (1430, 2320),
    "_find_long_runs": (550, 550),
    "_sum_long_runs": (690, 690),
}
"""Warp-instructions of a program: of a tile of 512 numbers, which is 4 rows of dim 128 or 32 of dim 16, or of 32
gradients of a long run. Loops count once, as for bags and runs of one entry."""
FOR_OLDER = 1.15  # times more with the Triton that torch 2.11 brings
FOR_OPTIONS = 1200  # more for gradients with factors, a scale, and those that are not finite
FOR_NARROW = 60  # more for gradients of 16 bits, which become float32
FOR_ODD_DIM = 150  # more for a tile of 256 numbers that are read one by one, where rows begin anywhere

FUSED = {"Nesterov": 3, "RowWiseAdagrad": 3, "Adam": 4, "AdamW": 4}  # multiply-adds of a number; other optimizers: 2
AGAIN = {"RowWiseAdagrad": 1}  # more, where Triton computes what it squares again rather than move it between threads
TILES = {"momentum": 1, "Nesterov": 1, "Adagrad": 1, "Ftrl": 2}  # numbers of state beside each, in rows of 16 bytes


@pytest.fixture(scope="module")
def pinned() -> Iterator[Compilers]:
    with compilers() as started:
        yield started


@pytest.fixture(scope="module")
def older() -> Iterator[Compilers]:
    if not OLDER.exists():
        pytest.skip(f"{OLDER} does not exist: `make test ALL=1` installs it")
    with compilers(OLDER) as started:
        assert started.version == "3.6.0"
        yield started


def launches(dim: int) -> list[Launch]:
    """Return every kind of launch."""
    updates = [
        Launch("update", dtype, dim, optimizer, options)
        for optimizer in OPTIMIZERS
        for dtype in DTYPES
        for options in ((), ALL_OPTIONS)
    ]
    updates += [
        Launch("update", "float32", dim, options=options)
        for options in (("factors",), ("scaled",), ("skip",), ("factors", "scaled"))
    ]
    updates += [
        Launch("update", dtype, dim, optimizer, ("bfloat16",))
        for optimizer in OPTIMIZERS
        for dtype in ("float32", "bfloat16")
    ]
    updates += [Launch("update", "float32", dim, options=(*ALL_OPTIONS, block)) for block in ("float16", "bfloat16")]
    blocks = (*((dtype, ()) for dtype in DTYPES), ("float32", ("bfloat16",)), ("float16", ("float16",)))
    pools = [
        Launch("pool", dtype, dim, options=(*options, *block))
        for dtype, block in blocks
        for options in ((), ("bags",), ("weighted",), ("bags", "weighted"))
    ]
    sequences = [
        Launch("sequence", dtype, dim, options=(*options, *block))
        for dtype, block in blocks
        for options in ((), ("bags",))
    ]
    exchanges = [
        Launch("exchange", dtype, dim, optimizer)
        for dtype in ("float32", "bfloat16")  # float16 is the same kernel
        for optimizer in ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "Ftrl")
    ]
    initial = [
        Launch("initialise", dtype, dim, optimizer, (kind,))
        for dtype in DTYPES
        for optimizer, kind in (
            ("SGD", "uniform"),
            ("Adam", "normal"),
            ("RowWiseAdagrad", "constant"),
            ("Ftrl", "normal"),
        )
    ]
    return [*updates, *pools, *sequences, *exchanges, *initial]


@pytest.mark.draw(1)
@pytest.mark.parametrize("dim", DIMS)
def test_kernels(pinned: Compilers, dim: int) -> None:
    require_sound(pinned, launches(dim))


@pytest.mark.draw(1)
@pytest.mark.parametrize("dim", DIMS)
def test_kernels_with_triton_3_6(older: Compilers, dim: int) -> None:
    require_sound(older, launches(dim))


def require_sound(compiled: Compilers, each: list[Launch]) -> list[Kernel]:
    """Fail with every fault of the kernels of some launches."""
    kernels, faults = compiled.compile(each)
    for kernel in kernels:
        found = (*arithmetic(kernel), *memory(kernel), *cost(kernel, FOR_OLDER if compiled.version == "3.6.0" else 1.0))
        faults += [f"{kernel} {fault}" for fault in found]
    assert not faults, "\n".join([f"{len(faults)} faults with Triton {compiled.version}:", *faults])
    assert len(kernels) >= len(TARGETS) * len(each)
    return kernels


def arithmetic(kernel: Kernel) -> Iterator[str]:
    """Yield where a kernel does not compute its formula. ptxas never contracts what says .rn."""
    for name in kernel.ptx:
        if re.search(r"\.(ftz|approx|full)\b|^(ex2|lg2|sin|cos|tanh|rsqrt)\b", name):
            yield f"approximates or flushes: {name}"
        if re.match(r"(add|sub|mul|mad)\.f(32|64)", name):
            yield f"leaves the rounding to ptxas, which may contract: {name}"
        if re.match(r"cvt\..*\b(b?f16|b?f16x2)\.f32$", name) and not name.startswith("cvt.rn."):
            yield f"does not round to the nearest: {name}"
    expected = again = 0
    if kernel.name == "_update_kernel":
        expected = FUSED.get(kernel.launch.optimizer, 2) * kernel.numbers
        again = AGAIN.get(kernel.launch.optimizer, 0) * kernel.numbers
    elif "uniform" in kernel.launch.options or {"bags", "weighted"} <= {*kernel.launch.options}:
        expected = kernel.numbers
    fused = {name: count for name, count in kernel.ptx.items() if name.startswith("fma")}
    count = fused.pop("fma.rn.f32", 0)
    if fused or count not in {expected + times * again for times in range(4)}:
        yield f"has {count} fma.rn.f32 and {fused}; its formula has {expected}"


def memory(kernel: Kernel) -> Iterator[str]:
    """Yield how a kernel wastes accesses to memory."""
    in_local_memory = [name for name in kernel.sass if name.startswith(("LDL", "STL"))]
    if kernel.stack or kernel.local or in_local_memory:
        yield f"spills: {kernel.stack} bytes of stack, {kernel.local} of local memory, {in_local_memory}"
    if kernel.launch.dim % 8 or kernel.name in ("_find_long_runs", "_sum_long_runs"):
        return
    values, block = (4 if dtype == "float32" else 2 for dtype in (kernel.launch.dtype, kernel.launch.block))
    tiles = TILES.get(kernel.launch.optimizer, 0)
    loads, stores = {
        "update": (values + 4 * tiles + block + 4, values + 4 * tiles),  # with a gradient, and the sum of a long run
        "pool": (values + 4, block),  # with initial values of absent rows
        "sequence": (values + 4, block),
        "initialise": (0, values + 4 * tiles),
        "exchange": (2 * values + 8 * min(tiles, 1), 2 * values + 8 * min(tiles, 1)),
    }[kernel.launch.launcher]
    for name, of_a_tile in (("LDG", loads), ("STG", stores)):
        expected = of_a_tile * kernel.numbers // 16
        wide = sum(count for each, count in kernel.sass.items() if each.startswith(name) and ".128" in each)
        if wide < expected:
            all_of = {each: count for each, count in kernel.sass.items() if each.startswith(name)}
            yield f"has {wide} {name} of 16 bytes; its rows need {expected}: {all_of}"


def cost(kernel: Kernel, factor: float) -> Iterator[str]:
    """Yield that a kernel has more instructions than its budget times the factor."""
    launch = kernel.launch
    budget = BUDGETS[kind(kernel)][launch.dtype != "float32"]
    if {*launch.options} & {*ALL_OPTIONS}:
        budget += FOR_OPTIONS
    if launch.block != "float32":
        budget += FOR_NARROW
    if launch.dim % 4:
        budget += FOR_ODD_DIM
    budget = int(budget * factor)
    if kernel.instructions > budget:
        yield f"has {kernel.instructions} warp-instructions; the budget is {budget}"


def kind(kernel: Kernel) -> str:
    """Return the name of a kernel's budget."""
    if kernel.name in BUDGETS:
        return kernel.name
    if kernel.launch.launcher == "update":
        return kernel.launch.optimizer
    if kernel.launch.launcher == "initialise":
        return kernel.launch.options[0]
    return "pool bags" if kernel.name == "_pool_kernel" and "bags" in kernel.launch.options else kernel.launch.launcher


def test_a_job_compiles_each_kernel_once(pinned: Compilers) -> None:
    """Whatever the sizes of its batches and the places of its tables among the runs. Pooling has two kernels: for bags,
    and for one id."""
    once = ("_sequence_kernel", "_update_kernel", "_find_long_runs", "_sum_long_runs", "_exchange_kernel")
    expected = {**dict.fromkeys((*once, "_initialise_kernel"), 1), "_pool_kernel": 2}
    assert pinned.variants() == dict.fromkeys(TARGETS, expected)


def test_a_job_compiles_each_kernel_once_with_triton_3_6(older: Compilers, pinned: Compilers) -> None:
    assert older.variants() == pinned.variants()


def test_the_table_of_the_note(pinned: Compilers) -> None:
    """docs/internals/004-device.md has what the kernels cost."""
    kinds = [("pool", "SGD", ()), ("pool", "SGD", ("bags",)), ("sequence", "SGD", ()), ("exchange", "SGD", ())]
    kinds += [("initialise", "SGD", (initial,)) for initial in ("uniform", "normal")]
    kinds += [("update", optimizer, ()) for optimizer in OPTIMIZERS]
    each = [
        Launch(name, dtype, 128, optimizer, options)
        for name, optimizer, options in kinds
        for dtype in ("float32", "bfloat16")
    ]
    kernels = require_sound(pinned, each)
    lines = [
        f"Triton {pinned.version} | "
        + " | ".join(f"{dtype}, sm_{t}" for dtype in ("float32", "bfloat16") for t in TARGETS),
        "---|---:|---:|---:|---:",
    ]
    found = {(kind(one), one.launch.dtype, one.target): one for one in kernels}
    for name in dict.fromkeys(kind(one) for one in kernels if not one.name.endswith("_long_runs")):
        cells = [found[name, dtype, t] for dtype in ("float32", "bfloat16") for t in TARGETS]
        lines.append(" | ".join([name, *(f"{round(one.instructions / one.rows)} ({one.reg})" for one in cells)]))
    table = "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)
    print(table)
    assert table in NOTE.read_text(), f"{NOTE.name} does not have this table:\n{table}"
