"""The cases of the training benchmark and the targets they must reach. Pure data; nothing is run here.

A case's name says all of it: kind/rows x dim/top layers/precision/optimizer/threads. The kinds:

    train   whole steps of a DLRM, each beside a step of the same model with fixed embeddings, against all peers
    read    Criteo's TSV from a file: how fast it is read, and what reading adds to a step (Satrap only)

Everywhere: batches of 4,096 samples, 13 dense numbers and 26 features of one id, drawn by Zipf(1.05).
"""

from dataclasses import dataclass
from itertools import product

from benchmarks.cases import MILLION, Target

BOTTOM = (512, 256)
DENSE_LR = 0.02
TOPS = {"light": (256, 1), "heavy": (1024, 1024, 512, 256, 1)}
PRECISIONS = ("fp32", "bf16")
OPTIMIZERS = ("adagrad", "rowwise")
DIMS = (16, 64)
# Samples/s of Satrap over those of the better way to call TorchRec.
END_TO_END = {("light", 16): 1.7, ("light", 64): 2.1, ("heavy", 16): 1.15, ("heavy", 64): 1.15}
COST = Target(figure="cost_ratio", at_most=0.25)
STALE = Target(figure="stale_ratio", at_least=0.97)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCase:
    """One line of the results."""

    kind: str
    rows: int
    """Of all tables together; of a file, its lines."""
    dim: int
    top: str
    """Which of TOPS."""
    precision: str
    """"fp32", or "bf16" for torch's autocast of the dense network."""
    optimizer: str = "adagrad"
    """Of the tables; the dense parameters are stepped by SGD."""
    num_threads: int = 2
    targets: tuple[Target, ...] = ()

    @property
    def name(self) -> str:
        rows = f"{self.rows // MILLION}M" if self.rows % MILLION == 0 else f"{self.rows // 1000}k"
        parts = [self.kind, f"{rows}x{self.dim}", self.top, self.precision, self.optimizer, f"{self.num_threads}t"]
        return "/".join(parts)

    @property
    def model(self) -> str:
        """What tells this case from others of its table."""
        return f"{self.top}/{self.precision}"

    @property
    def in_every_form(self) -> bool:
        """Whether peers are measured with fewer threads and as several processes, too.

        A heavy step is nine tenths dense products, in whatever form: they would take most of the benchmark's time.
        """
        return self.top == "light"

    @property
    def table(self) -> tuple[object, ...]:
        """Cases that agree on this are measured on one table."""
        return (self.kind, self.rows, self.dim, self.optimizer, self.num_threads)


def full_cases(num_threads: int) -> list[TrainCase]:
    """Every case that the project's targets speak of."""
    cases = []
    for dim, optimizer, top, precision in product(DIMS, OPTIMIZERS, TOPS, PRECISIONS):
        end_to_end = Target(figure="ratio", at_least=END_TO_END[top, dim])
        targets = (end_to_end, COST, STALE) if precision == "fp32" else (COST, STALE)
        case = TrainCase(
            kind="train",
            rows=20 * MILLION,
            dim=dim,
            top=top,
            precision=precision,
            optimizer=optimizer,
            num_threads=num_threads,
            targets=targets,
        )
        cases.append(case)
    return [*cases, *_read_cases(num_threads)]


def quick_cases(num_threads: int) -> list[TrainCase]:
    """A small table and both models, to see in a minute or two that all of it runs and roughly how fast."""
    models = [("light", "fp32"), ("light", "bf16"), ("heavy", "fp32")]
    trained = [
        TrainCase(kind="train", rows=MILLION, dim=16, top=top, precision=precision, num_threads=num_threads)
        for top, precision in models
    ]
    read = TrainCase(kind="read", rows=40_000, dim=16, top="light", precision="fp32", num_threads=num_threads)
    return [*trained, read]


def _read_cases(num_threads: int) -> list[TrainCase]:
    targets = (Target(figure="mb_per_s", at_least=150.0), Target(figure="added_share", at_most=0.10))
    return [
        TrainCase(
            kind="read",
            rows=250_000,
            dim=16,
            top="heavy",
            precision=precision,
            num_threads=num_threads,
            targets=targets,
        )
        for precision in PRECISIONS
    ]
