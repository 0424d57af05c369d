"""The cases of the training benchmark and their targets. Pure data; nothing is run here.

A case's name is kind/rows x dim/top layers/precision/optimizer/threads. The kinds:

    train   whole steps of a DLRM, each followed by a step of the same model with fixed embeddings, against all peers
    read    Criteo's TSV from a file: how fast it is read, and what reading adds to a step (Satrap only)

All use batches of 4,096 samples, 13 dense numbers and 26 features of one id, drawn by Zipf(1.05). The dense parameters
are updated by SGD.
"""

from dataclasses import replace
from itertools import product

from benchmarks.harness.case import MILLION, Case, Target

BOTTOM = (512, 256)
DENSE_LR = 0.02
TOPS = {"light": (256, 1), "heavy": (1024, 1024, 512, 256, 1)}
PRECISIONS = ("fp32", "bf16")
# Ratio of Satrap's samples/s to those of the better way to call TorchRec.
END_TO_END = {("light", 16): 1.7, ("light", 64): 2.1, ("heavy", 16): 1.15, ("heavy", 64): 1.15}
COST = Target(figure="cost_ratio", at_most=0.25)
STALE = Target(figure="stale_ratio", at_least=0.97)
READ = (Target(figure="mb_per_s", at_least=150.0), Target(figure="added_share", at_most=0.10))
BASE = Case(kind="train", optimizer="adagrad", num_threads=2, num_warmup=5, num_steps=20)
QUICK = replace(BASE, rows=MILLION, dim=16, num_warmup=2, num_steps=4)


def full_cases() -> list[Case]:
    """Return every case that the project's targets name."""
    cases = []
    for dim, optimizer, top, precision in product((16, 64), ("adagrad", "rowwise"), TOPS, PRECISIONS):
        end_to_end = Target(figure="ratio", at_least=END_TO_END[top, dim])
        targets = (end_to_end, COST, STALE) if precision == "fp32" else (COST, STALE)
        case = replace(BASE, rows=20 * MILLION, dim=dim, top=top, precision=precision, targets=targets)
        cases.append(replace(case, optimizer=optimizer))
    read = replace(BASE, kind="read", rows=250_000, dim=16, top="heavy", targets=READ)
    return [*cases, *(replace(read, precision=precision) for precision in PRECISIONS)]


def quick_cases() -> list[Case]:
    """Return a small table with both models, which shows in a minute or two that all of it runs."""
    models = [("light", "fp32"), ("light", "bf16"), ("heavy", "fp32")]
    read = replace(QUICK, kind="read", rows=40_000, top="light", precision="fp32")
    return [*(replace(QUICK, top=top, precision=precision) for top, precision in models), read]
