"""What the pages say about each experiment: its claims, plots and tables, computed from the record. Pure."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.paper import convergence, network, simulation, theory
from benchmarks.paper.page import Record, Section, Text
from benchmarks.paper.plot import Bars, Chart, HeatMap, Line

COLOURS = {"sync": 0, "hybrid 1": 4, "hybrid 4": 2, "hybrid 16": 3, "hybrid 64": 5, "async 4": 1}
NAMES = {"sync": "synchronous", "async 4": "asynchronous"}
PAPER_GPUS = (1, 4, 8, 16, 32, 64)
PAPER = {"hybrid 4": (11, 45, 98, 137, 232, 400), "async 4": (None, None, 126, 215, 321, 578), "sync": (None, 14, 29, 47, 89, 156)}
"""The paper's throughput on its video data by number of GPUs, read off its figure."""


def sections(record: Record) -> list[Section]:
    """Return a section for each experiment of which the record has enough."""
    made: list[Callable[[Record], Iterator[Section]]] = [theory_section, convergence_sections, throughput_section]
    return [section for make in made for section in make(record)]


def name_of(mode: str) -> str:
    """Return a mode as a label."""
    return NAMES.get(mode, mode)


# -- theory --------------------------------------------------------------------------------------------------------------


def theory_section(record: Record) -> Iterator[Section]:
    """The bound and the effect of alpha."""
    curves, fixed = record.below("theory/bound/"), record.below("theory/fixed/")
    if len(curves) < 2 * len(theory.PROBLEMS) or len(fixed) < 3:
        return
    ratios = [bound / error for each in curves.values() for bound, error in zip(each["bounds"], each["errors"], strict=True)]
    lines = []
    for mode in ("hybrid", "async"):
        figures, colour = curves[f"ids=512,zipf=0/{mode}"], 2 if mode == "hybrid" else 1
        for name, key, dashed in ((f"{mode}: bound", "bounds", True), (f"{mode}: measured", "errors", False)):
            points = [(max(tau, 0.5), y) for tau, y in zip(figures["taus"], figures[key], strict=True)]
            lines.append(Line(name=name, points=points, colour=colour, is_dashed=dashed))
    growth = []
    for at, (num_ids, zipf) in enumerate(theory.PROBLEMS[:3]):
        figures = fixed[f"ids={num_ids},zipf={zipf:g}"]
        for mode, dashed in (("hybrid", False), ("async", True)):
            points = [(max(tau, 1.0), y) for tau, y in zip(figures["taus"], figures[mode], strict=True)]
            label = f"{mode}, alpha {figures['alpha']:.2g}"
            growth.append(Line(name=label, points=points, colour=(1, 3, 2)[at], is_dashed=dashed))
    at = theory.FIXED_TAUS.index(16)
    rows: list[Text] = [[
        f"With the rate that the theorem permits, {sum(ratio >= 1 for ratio in ratios)} of {len(ratios)} settings lie "
        f"below the bound, by a factor of {min(ratios):.1f} to {max(ratios):.0f}. docs/theory.md derives it."
    ]]  # fmt: skip
    text: list[Any] = ["With a fixed rate and 16 steps of delay, the error is, as a multiple of that without delay: "]
    for num_ids, zipf in theory.PROBLEMS[:3]:
        cell = f"theory/fixed/ids={num_ids},zipf={zipf:g}"
        text += [record.claim(cell, f"hybrid.{at}", "{:.3g}"), " (hybrid) and ", record.claim(cell, f"async.{at}", "{:.3g}"),
                 " (asynchronous) at alpha ", record.claim(cell, "alpha", "{:.2g}"), "; "]  # fmt: skip
    text[-1] = ". Alpha is the share of samples that the hottest id is in: late rows cost little where ids are rare, late "
    text.append("dense weights always cost.")
    yield Section(
        title="The theory", kind="measured, on a problem whose constants are known; the bound is computed",
        paragraphs=[*rows, text],
        plots=[
            Chart(title="The bound holds (512 ids, alpha 0.015)", x="delay tau, steps (0 drawn at 0.5)",
                  y="mean squared norm of the gradient", lines=lines, log_x=True, log_y=True,
                  x_ticks=(0.5, 1, 4, 16, 64, 256), slug="bound"),
            Chart(title="Late rows cost little where ids are rare", x="delay tau, steps (0 drawn at 1)",
                  y="error, multiple of that without delay (asynchronous dashed)", lines=growth, log_x=True, log_y=True,
                  x_ticks=(1, 4, 16, 64), slug="alpha"),
        ],
    )  # fmt: skip


# -- convergence ---------------------------------------------------------------------------------------------------------


def convergence_sections(record: Record) -> Iterator[Section]:
    """A section for each data set."""
    for name in dict.fromkeys(key.split("/")[0] for key in record.below("convergence/curve/")):
        curves = record.below(f"convergence/curve/{name}/")
        if len(curves) == len(convergence.MODES):
            yield _convergence(record, name, curves)


def _convergence(record: Record, name: str, curves: dict[str, Any]) -> Section:
    late = convergence.MODES[1:]
    prefix = f"convergence/curve/{name}"
    low = min(auc["mean"] for each in curves.values() for auc in each["aucs"][2:])
    lines = [
        Line(name=name_of(mode), colour=COLOURS[mode],
             points=[(x, auc["mean"]) for x, auc in zip(each["samples"], each["aucs"], strict=True)][1:])
        for mode, each in curves.items()
    ]  # fmt: skip
    bars = [
        (f"{contender}, {mode}", *(1e4 * each["difference"][key] for key in ("mean", "low", "high")))
        for contender, kind in (("Satrap", "curve"), ("plain torch", "control"))
        for mode, each in record.below(f"convergence/{kind}/{name}/").items()
        if mode in late
    ]
    plots: list[Any] = [
        Chart(title=f"{name}: AUC by samples, tuned rates", x="samples trained on", y="AUC on the test part", lines=lines,
              low=low - 0.004, slug=f"auc-{name}"),
        Bars(title=f"{name}: difference to synchronous training", value="AUC difference, 1e-4, with its 95 % interval",
             bars=bars, text="{:+.1f}".format, slug=f"difference-{name}"),
    ]  # fmt: skip
    plots += _wall_time(record, name, curves, low) + _heat_map(record, name)
    hybrid, free = curves["hybrid 4"]["difference"], curves["async 4"]["difference"]
    shows = hybrid["low"] > -0.001 and free["high"] < min(0.0, hybrid["mean"])
    verdict = (
        "The paper's claim shows here: hybrid training loses less than 0.001, asynchronous training loses more."
        if shows
        else "The paper's claim does not show here: " + _why(hybrid, free)
    )
    claim = record.claim
    text: list[Any] = [
        "Synchronous training reaches an AUC of ", claim(f"{prefix}/sync", "auc.mean", "{:.4f}"), ". Hybrid training at staleness 4 differs by ",
        claim(f"{prefix}/hybrid 4", "difference.mean", "{:+.4f}"), " (95 % interval ", claim(f"{prefix}/hybrid 4", "difference.low", "{:+.4f}"), " to ",
        claim(f"{prefix}/hybrid 4", "difference.high", "{:+.4f}"), "), asynchronous training by ", claim(f"{prefix}/async 4", "difference.mean", "{:+.4f}"),
        " (", claim(f"{prefix}/async 4", "difference.low", "{:+.4f}"), " to ", claim(f"{prefix}/async 4", "difference.high", "{:+.4f}"), "). ", verdict,
    ]  # fmt: skip
    how = (
        f"Four trainers with batches of 64; {len(hybrid['values'])} paired seeds, "
        f"{curves['sync']['num_samples']:,} samples to train on and {curves['sync']['num_test_samples']:,} to test on; "
        "dense and row learning rates chosen for each mode on the validation part. Delays are exact: asynchronous "
        "training misses 19 small steps, rows and dense weights alike. Plain torch with the same rates and delays is the "
        "control."
    )
    return Section(title=f"Convergence: {name}", kind="measured; the times of the AUC by time are computed",
                   paragraphs=[text, [how]], plots=plots)  # fmt: skip


def _why(hybrid: dict[str, Any], free: dict[str, Any]) -> str:
    if hybrid["low"] <= -0.001 < hybrid["mean"]:
        return "the seeds do not settle it, since the interval of the hybrid difference reaches below -0.001."
    if hybrid["low"] <= -0.001:
        return "hybrid training loses more than 0.001. The hot ids are in most samples; see reuse below."
    if free["low"] > 0:
        return "asynchronous training is better, since its trainers take four times as many steps, each on fewer samples."
    return "asynchronous training loses nothing that these seeds can tell from chance, once its rates are tuned."


def _wall_time(record: Record, name: str, curves: dict[str, Any], low: float) -> list[Chart]:
    lines = []
    for mode in ("sync", "hybrid 4", "async 4"):
        point = record.figures(f"network/point/3x3/{mode}")
        if point is None:
            return []
        points = [
            (x / point["samples_per_s"], auc["mean"])
            for x, auc in zip(curves[mode]["samples"], curves[mode]["aucs"], strict=True)
        ]
        lines.append(Line(name=name_of(mode), points=points[1:], colour=COLOURS[mode], is_dashed=True))
    return [Chart(title=f"{name}: AUC by time", x="seconds at the measured rate of three trainers (see throughput)",
                  y="AUC on the test part", lines=lines, low=low - 0.004, slug=f"time-{name}")]  # fmt: skip


def _heat_map(record: Record, name: str) -> list[HeatMap]:
    cells = record.below(f"convergence/map/{name}/")
    if not cells:
        return []
    columns = list(next(iter(cells.values()))["differences"])
    rows = []
    for label, each in cells.items():
        size, trainers, lr = (part.split("=")[-1] for part in label.split(","))
        rows.append((f"{size}, {trainers} trainers, lr {lr}", [1e3 * each["differences"][column] for column in columns]))
    return [HeatMap(title=f"{name}: where delays do harm (untuned)", columns=columns, rows=rows, full=20,
                    note="AUC minus synchronous, 1e-3, by dense network, trainers, dense lr; kind and staleness",
                    slug=f"map-{name}")]  # fmt: skip


# -- throughput ----------------------------------------------------------------------------------------------------------


def throughput_section(record: Record) -> Iterator[Section]:
    """Measured points, the simulation's errors, and its curves."""
    validation = record.figures("simulation/validation")
    if validation is None:
        return
    claim, check = record.claim, "simulation/validation"
    small, large, servers = [], [], []
    for mode in network.MODES:
        points = [point for point in validation["points"] if point[2] == mode]
        for name, column, dashed in (("measured", 3, False), ("simulated", 4, True)):
            rates = [(p[0], p[0] * network.BATCH / p[column] * 1e3) for p in points if p[0] == p[1] or p[:2] == [2, 1]]
            small.append(Line(name=f"{name_of(mode)}, {name}", points=rates, colour=COLOURS[mode], is_dashed=dashed))
        curve = record.figures(f"simulation/trainers/{mode}")
        if curve:
            first = curve["points"][0][2]
            large.append(Line(name=name_of(mode), points=[(p[0], p[2] / first) for p in curve["points"]], colour=COLOURS[mode], is_dashed=True))
        over = record.figures(f"simulation/servers/{mode}")
        if over:
            servers.append(Line(name=name_of(mode), points=[(p[0], p[1]) for p in over["points"]], colour=COLOURS[mode], is_dashed=True))
    paper = [(gpus, value / 11) for gpus, value in zip(PAPER_GPUS, PAPER["hybrid 4"], strict=True) if value]
    large.append(Line(name="the paper's hybrid", points=paper, colour=4, is_faint=True))
    best = record.figures("network/point/3x3/sync"), record.figures("network/point/3x3/hybrid 4")
    text: list[Any] = [
        f"Trainers and servers exchange real rows, gradients and all-reduces over links of {network.LINK.gbit:g} Gbit/s "
        f"with {network.LINK.delay_ms:g} ms each way; the device is emulated by a pause of "
        f"{1e3 * network.DEVICE_SECONDS:g} ms. "
    ]  # fmt: skip
    if best[0] and best[1]:
        text += ["Three trainers over three servers take ", claim("network/point/3x3/sync", "step_ms", "{:.0f}"), " ms a step synchronously, ",
                 claim("network/point/3x3/hybrid 4", "step_ms", "{:.0f}"), " hybrid and ", claim("network/point/3x3/async 4", "step_ms", "{:.0f}"),
                 f" asynchronously: hybrid is {best[0]['step_ms'] / best[1]['step_ms']:.2f} times as fast as synchronous. The paper has 2.6 "
                 "to 3.8. "]  # fmt: skip
    text += ["The simulation is calibrated with one trainer and one server; on the other points it is off by ", claim(check, "mean_error", "{:.0%}"),
             " in the mean and ", claim(check, "worst_error", "{:.0%}"), " at worst."]  # fmt: skip
    rows = [[str(w), str(s), name_of(m), f"{a:.1f}", f"{b:.1f}", f"{e:+.0%}"] for w, s, m, a, b, e in validation["points"]]
    plots = [Chart(title="Measured and simulated rates", x="trainers (1x1, 2x1, 3x3 servers)", y="samples/s", lines=small,
                   x_ticks=(1, 2, 3), slug="rates")]  # fmt: skip
    if large and servers:
        plots += [Chart(title="Speed-up, simulated, servers in proportion", x="trainers", y="times the rate of one trainer", lines=large,
                        log_x=True, log_y=True, x_ticks=simulation.TRAINERS, slug="speedup"),
                  Chart(title="64 trainers over more servers, simulated", x="servers", y="samples/s", lines=servers,
                        log_x=True, log_y=True, x_ticks=simulation.SERVERS, slug="servers")]  # fmt: skip
    yield Section(title="Throughput", kind="measured to three trainers and servers, simulated beyond", paragraphs=[text],
                  plots=plots, header=("trainers", "servers", "mode", "measured, ms", "simulated, ms", "error"), rows=rows)  # fmt: skip
