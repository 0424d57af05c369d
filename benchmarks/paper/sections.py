"""What the pages say about each experiment: its claims, plots and tables, computed from the record. Pure.

In a text, <cell#path|format> is a figure of the record.
"""

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

from benchmarks.paper import capacity, convergence, network, peers, simulation, theory
from benchmarks.paper.page import Record, Section
from benchmarks.paper.plot import Bars, Chart, HeatMap, Line, Plot

COLOURS = {"sync": 0, "hybrid 1": 4, "hybrid 4": 2, "hybrid 16": 3, "hybrid 64": 5, "async 4": 1}
NAMES = {"sync": "synchronous", "async 4": "asynchronous"}
PAPER_GPUS, PAPER_RATES = (1, 4, 8, 16, 32, 64), (11, 45, 98, 137, 232, 400)
"""The paper's throughput on its video data, read off its figure."""


def sections(record: Record) -> list[Section]:
    """Return a section for each experiment of which the record has enough."""
    made: list[Callable[[Record], Iterator[Section]]] = [_theory, _convergence, _reuse, _throughput, _capacity]
    made += [_campaign, _baselines, _devices]
    made.insert(made.index(_capacity), _peers)
    return [section for make in made for section in make(record)]


def _name(mode: str) -> str:
    return NAMES.get(mode, mode)


def _theory(record: Record) -> Iterator[Section]:
    curves, fixed = record.below("theory/bound/"), record.below("theory/fixed/")
    if len(curves) < 2 * len(theory.PROBLEMS) or len(fixed) < 3:
        return
    ratios = [
        bound / error for each in curves.values() for bound, error in zip(each["bounds"], each["errors"], strict=True)
    ]
    lines, growth = [], []
    for mode, colour in (("hybrid", 2), ("async", 1)):
        figures = curves[f"ids=512,zipf=0/{mode}"]
        for what, key in (("bound", "bounds"), ("measured", "errors")):
            points = [(max(tau, 0.5), y) for tau, y in zip(figures["taus"], figures[key], strict=True)]
            lines.append(Line(name=f"{mode}: {what}", points=points, colour=colour, is_dashed=what == "bound"))
    at, sentences = theory.FIXED_TAUS.index(16), []
    for (num_ids, zipf), colour in zip(theory.PROBLEMS[:3], (1, 3, 2), strict=True):
        cell = f"theory/fixed/ids={num_ids},zipf={zipf:g}"
        figures = fixed[cell.removeprefix("theory/fixed/")]
        for mode in ("hybrid", "async"):
            points = [(max(tau, 1.0), y) for tau, y in zip(figures["taus"], figures[mode], strict=True)]
            label = f"{mode}, alpha {figures['alpha']:.2g}"
            growth.append(Line(name=label, points=points, colour=colour, is_faint=mode == "async"))
        sentences.append(f"<{cell}#hybrid.{at}|.3g> and <{cell}#async.{at}|.3g> at alpha <{cell}#alpha|.2g>")
    text = (
        f"With the rate that the theorem permits, {sum(ratio >= 1 for ratio in ratios)} of {len(ratios)} settings lie "
        f"below the bound, by a factor of {min(ratios):.1f} to {max(ratios):.0f} (derived in docs/theory.md). With a "
        "fixed rate and 16 steps of delay, the errors of hybrid and asynchronous training are, as multiples of the "
        f"error without delay: {'; '.join(sentences)}. Alpha is the share of samples that the hottest id is in: late "
        "rows cost little where ids are rare, late dense weights always cost."
    )
    charts = [
        Chart(
            title="The bound holds (512 ids, alpha 0.015)", x="delay tau, steps (0 drawn at 0.5)", slug="bound",
            y="mean squared norm of the gradient", lines=lines, log_x=True, log_y=True,
            x_ticks=(0.5, 1, 4, 16, 64, 256),
        ),
        Chart(
            title="Late rows cost little where ids are rare", x="delay tau, steps (0 drawn at 1)", slug="alpha",
            y="error, multiple of that without delay (asynchronous: pale)", lines=growth, log_x=True, log_y=True,
            x_ticks=(1, 4, 16, 64),
        ),
    ]  # fmt: skip
    kind = "measured, on a problem whose constants are known; the bound is computed"
    yield Section(title="The theory", kind=kind, paragraphs=[record.text(text)], plots=charts)


# -- convergence ----------------------------------------------------------------------------------------


def _convergence(record: Record) -> Iterator[Section]:
    for name in dict.fromkeys(key.split("/")[0] for key in record.below("convergence/curve/")):
        curves = record.below(f"convergence/curve/{name}/")
        if len(curves) == len(convergence.MODES):
            yield _of_data(record, name, curves)


def _of_data(record: Record, name: str, curves: dict[str, Any]) -> Section:
    low = min(auc["mean"] for each in curves.values() for auc in each["aucs"][2:]) - 0.004
    lines = [Line(name=_name(mode), points=_aucs(each), colour=COLOURS[mode]) for mode, each in curves.items()]
    bars = [
        (f"{contender}, {mode}", *(1e4 * each["difference"][key] for key in ("mean", "low", "high")))
        for contender, kind in (("Satrap", "curve"), ("plain torch", "control"))
        for mode, each in record.below(f"convergence/{kind}/{name}/").items()
        if mode != "sync"
    ]
    plots: list[Plot] = [
        Chart(
            title=f"{name}: AUC by samples, tuned rates", x="samples trained on", y="AUC on the test part", lines=lines,
            low=low, slug=f"auc-{name}",
        ),
        Bars(
            title=f"{name}: difference to synchronous training", bars=bars, text="{:+.1f}".format,
            value="AUC difference, 1e-4, with its 95 % interval", slug=f"difference-{name}",
        ),
        *_by_time(record, name, curves, low),
        *_heat_map(record, name),
    ]  # fmt: skip
    cell = f"convergence/curve/{name}"
    hybrid, free = (f"{cell}/{mode}#difference" for mode in ("hybrid 4", "async 4"))
    text = (
        f"Synchronous training reaches an AUC of <{cell}/sync#auc.mean|.4f>. Hybrid training at staleness 4 differs by "
        f"<{hybrid}.mean|+.4f> (95 % interval <{hybrid}.low|+.4f> to <{hybrid}.high|+.4f>), asynchronous training by "
        f"<{free}.mean|+.4f> (<{free}.low|+.4f> to <{free}.high|+.4f>). "
        + _verdict(curves["hybrid 4"]["difference"], curves["async 4"]["difference"], curves["sync"])
    )
    fresh = curves["sync"]
    how = (
        f"Four trainers with batches of 64; {len(fresh['auc']['values'])} paired seeds, {fresh['num_samples']:,} "
        f"samples to train on and {fresh['num_test_samples']:,} to test on; dense and row learning rates chosen for "
        "each mode on the validation part. Delays are exact: asynchronous training misses "
        f"{curves['async 4']['delay']} small steps, rows and dense weights alike. Plain torch with the same rates and "
        "delays is the control."
    )
    kind = "measured; the times of the AUC by time are computed"
    texts = [record.text(text), record.text(how)]
    return Section(title=f"Convergence: {name}", kind=kind, paragraphs=texts, plots=plots)


def _aucs(curve: dict[str, Any], rate: float = 1.0) -> list[tuple[float, float]]:
    return [(x / rate, auc["mean"]) for x, auc in zip(curve["samples"], curve["aucs"], strict=True)][1:]


def _verdict(hybrid: dict[str, Any], free: dict[str, Any], fresh: dict[str, Any]) -> str:
    if hybrid["low"] > -0.001 and free["high"] < min(0.0, hybrid["mean"]):
        return "The paper's claim shows here: hybrid training loses less than 0.001, asynchronous training loses more."
    why = "asynchronous training loses nothing that these seeds can tell from chance, once its rates are tuned."
    if hybrid["mean"] <= -0.001:
        steps = fresh["num_samples"] // (fresh["setting"]["batch"] * fresh["setting"]["trainers"])
        why = f"hybrid training loses more than 0.001. There are only {steps} steps, so being four steps late counts"
        why += ", and so does reuse (below)."
        if free["mean"] < 2 * hybrid["mean"]:
            why += f" Asynchronous training loses {free['mean'] / hybrid['mean']:.0f} times as much."
    elif hybrid["low"] <= -0.001:
        why = "the seeds do not settle it, since the interval of the hybrid difference reaches below -0.001."
    elif free["low"] > 0:
        why = "asynchronous training is better: its trainers take four times as many steps, each on fewer samples."
    return f"The paper's claim does not show here: {why}"


def _by_time(record: Record, name: str, curves: dict[str, Any], low: float) -> list[Chart]:
    points = {mode: record.figures(f"network/point/3x3/{mode}") for mode in network.MODES}
    lines = [
        Line(name=_name(mode), points=_aucs(curves[mode], point["samples_per_s"]), colour=COLOURS[mode], is_dashed=True)
        for mode, point in points.items()
        if point
    ]
    x = "seconds at the measured rate of three trainers (see throughput)"
    chart = Chart(
        title=f"{name}: AUC by time", x=x, y="AUC on the test part", lines=lines, low=low, slug=f"time-{name}"
    )
    return [chart] if len(lines) == len(points) else []


def _heat_map(record: Record, name: str) -> list[HeatMap]:
    cells = record.below(f"convergence/map/{name}/")
    if not cells:
        return []
    columns, rows = list(next(iter(cells.values()))["differences"]), []
    for label, each in cells.items():
        size, trainers, lr = (part.split("=")[-1] for part in label.split(","))
        values = [1e3 * each["differences"][column] for column in columns]
        rows.append((f"{size}, {trainers} trainers, lr {lr}", values))
    note = "AUC minus synchronous, 1e-3, by network, trainers, dense lr; kind and staleness"
    title = f"{name}: where delays do harm (untuned)"
    return [HeatMap(title=title, columns=columns, rows=rows, full=20, note=note, slug=f"map-{name}")]


# -- throughput, capacity ----------------------------------------------------------------------------------------


def _throughput(record: Record) -> Iterator[Section]:
    validation = record.figures("simulation/validation")
    if validation is None:
        return
    rates, speedups, servers = [], [], []
    for mode in network.MODES:
        style: dict[str, Any] = {"colour": COLOURS[mode], "is_dashed": True}
        points = [point for point in validation["points"] if point[2] == mode and point[:2] in ([1, 1], [2, 1], [3, 3])]
        for name, column in ((_name(mode), 3), ("", 4)):
            curve = [(p[0], p[0] * network.BATCH / p[column] * 1e3) for p in points]
            line = Line(name=name, points=curve, colour=COLOURS[mode], is_dashed=column == 4)
            rates.append(line)
        if simulated := record.figures(f"simulation/trainers/{mode}"):
            scaled = [(p[0], p[2] / simulated["points"][0][2]) for p in simulated["points"]]
            speedups.append(Line(name=_name(mode), points=scaled, **style))
        if simulated := record.figures(f"simulation/servers/{mode}"):
            servers.append(Line(name=_name(mode), points=[(p[0], p[1]) for p in simulated["points"]], **style))
    paper = [(gpus, rate / PAPER_RATES[0]) for gpus, rate in zip(PAPER_GPUS, PAPER_RATES, strict=True)]
    speedups.append(Line(name="the paper's hybrid", points=paper, colour=4))
    plots = [Chart(title="Measured rates (dashed: simulated)", x="trainers (over 1, 1 and 3 servers)", y="samples/s",
                   lines=rates, x_ticks=(1, 2, 3), slug="rates")]  # fmt: skip
    if servers:
        plots += [
            Chart(
                title="Speed-up, simulated, servers in proportion", x="trainers", y="times the rate of one trainer",
                lines=speedups, log_x=True, log_y=True, x_ticks=simulation.TRAINERS, slug="speedup",
            ),
            Chart(
                title="64 trainers over more servers, simulated", x="servers", y="samples/s", lines=servers, log_x=True,
                log_y=True, x_ticks=simulation.SERVERS, slug="servers",
            ),
        ]  # fmt: skip
    text = (
        f"Trainers and servers exchange real rows, gradients and all-reduces over links of {network.LINK.gbit:g} "
        f"Gbit/s with {network.LINK.delay_ms:g} ms each way; the device is a pause of "
        f"{1e3 * network.DEVICE_SECONDS:g} ms. "
    )
    cell = "network/point/3x3"
    steps = [record.figures(f"{cell}/{mode}") for mode in ("sync", "hybrid 4")]
    if steps[0] and steps[1]:
        text += (
            f"Three trainers over three servers take <{cell}/sync#step_ms|.0f> ms a step synchronously, "
            f"<{cell}/hybrid 4#step_ms|.0f> hybrid and <{cell}/async 4#step_ms|.0f> asynchronously: hybrid training "
            f"is {steps[0]['step_ms'] / steps[1]['step_ms']:.2f} times as fast as synchronous training. The paper "
            "reports 2.6 times at 100 trillion parameters and up to 3.8 times. "
        )
    check = "simulation/validation"
    text += (
        "The simulation is calibrated with one trainer and one server; on the other points it is off by "
        f"<{check}#mean_error|.0%> in the mean and <{check}#worst_error|.0%> at worst."
    )
    rows = [
        [str(w), str(s), _name(m), f"{a:.1f}", f"{b:.1f}", f"{e:+.0%}"] for w, s, m, a, b, e in validation["points"]
    ]
    header = ("trainers", "servers", "mode", "measured, ms", "simulated, ms", "error")
    kind = "measured to three trainers and servers, simulated beyond"
    yield Section(title="Throughput", kind=kind, paragraphs=[record.text(text)], plots=plots, header=header, rows=rows)


def _peers(record: Record) -> Iterator[Section]:
    plots, shown = [], {"satrap": "Satrap", "torch": "plain PyTorch", "fbgemm": "FBGEMM"}
    shown |= {"torchrec": "TorchRec", "paddle": "PaddlePaddle", "satrap_direct": "Satrap, num_rows"}
    for suite in peers.CASES:
        for name, contenders in (record.figures(f"peers/{suite}") or {}).items():
            rates = {shown[key]: f["samples_per_s"] for key, f in contenders.items() if key in shown}
            bars = [(label, rate / 1e3, rate / 1e3, rate / 1e3) for label, rate in rates.items()]
            slug = f"peers-{suite}-{name.rsplit(' ', 1)[-1]}"
            plots.append(Bars(title=f"A light DLRM {name}", value="thousand samples/s", bars=bars, slug=slug))
    if plots:
        text = (
            "The same DLRM with a light top network and 20M rows of 16 on two cores, each system in its fastest form "
            "of threads, processes and page sizes; one round each. Over one server the peer is the parameter server "
            "of PaddlePaddle. The paper reports up to 7.12 times PaddlePaddle and XDL on 8 to 64 GPUs; "
            "docs/comparison.md has more rounds on other processors."
        )
        yield Section(title="Beside other systems", kind="measured", paragraphs=[[text]], plots=plots)


def _capacity(record: Record) -> Iterator[Section]:
    rungs = {rung: record.figures(f"capacity/rung/{rung:g}T") for rung in capacity.RUNGS}
    held = {rung: figures for rung, figures in rungs.items() if figures}
    if len(held) < 2:
        return
    kinds = {"uniform": "uniform ids", "zipf": "Zipf's ids", "unequal": "a tenth of the ids new"}
    first = held[min(held)]["rows_per_s"]
    lines = [
        Line(name=name, points=[(rung, f["rows_per_s"][kind] / first[kind]) for rung, f in held.items()], colour=at)
        for at, (kind, name) in enumerate(kinds.items())
    ]
    plots: list[Plot] = [
        Chart(
            title="Rate along the ladder", x="parameters, trillions", y="rows/s, share of the first rung's",
            lines=lines, log_x=True, x_ticks=capacity.RUNGS, low=0.0, slug="ladder",
        )
    ]  # fmt: skip
    aucs = sorted(record.below("capacity/auc/").values(), key=lambda each: each["share"])
    if len(aucs) > 1:
        points = [(100 * each["share"], each["auc"]["mean"]) for each in aucs]
        band = [(each["auc"]["low"], each["auc"]["high"]) for each in aucs]
        plots.append(
            Chart(
                title="AUC by capacity (synthetic clicks)", x="capacity, % of the ids", y="AUC on the test part",
                lines=[Line(name="synchronous", points=points, band=band)], log_x=True, slug="capacity",
                x_ticks=[100 * share for share in capacity.SHARES],
            )
        )  # fmt: skip
    plots += _sizes(record)
    rows = [
        [
            f"{rung:g} T", f"{f['ids'] / 1e9:,.0f} G", f"{f['rows']:,}", f"{f['resident_bytes'] / 2**30:.2f}",
            f"{f['share_of_memory']:.0%}", *(f"{f['rows_per_s'][kind]:,.0f}" for kind in kinds),
            f"{f['save_seconds']:.1f}", f"{f['load_seconds']:.1f}",
        ]
        for rung, f in held.items()
    ]  # fmt: skip
    header = ["rung", "ids", "rows", "GiB", "of free memory", *(f"{name}, rows/s" for name in kinds.values())]
    text = record.text(_capacity_text(record, held, kinds))
    yield Section(
        title="Capacity", kind="measured; the machines are computed", paragraphs=[text], plots=plots,
        header=[*header, "save, s", "load, s"], rows=rows,
    )  # fmt: skip


def _capacity_text(record: Record, rungs: dict[float, Any], kinds: dict[str, str]) -> str:
    first, end = (rungs[at(rungs)]["rows_per_s"] for at in (min, max))
    shares = ", ".join(f"{end[kind] / first[kind]:.2f} ({name})" for kind, name in kinds.items())
    last, plan = f"capacity/rung/{max(rungs):g}T", "capacity/plan"
    text = (
        "Each rung draws from its whole range of ids and fills twice the memory of the one before, in a process "
        f"without anything else; the last one fills <{last}#share_of_memory|.0%> of the free memory with "
        f"<{last}#rows|,> rows. Every rung was saved and loaded again, with the same rows. As shares of the first "
        f"rung's rates, the last one has {shares}."
    )
    sizes = [record.figures(f"capacity/size/{size}M") for size in (capacity.SIZES[0], capacity.SIZES[-1])]
    if sizes[0] and sizes[1]:
        every, few = (sizes[1]["rows_per_s"][kind] / sizes[0]["rows_per_s"][kind] for kind in ("all", "few"))
        text += (
            f" A table of {capacity.SIZES[-1]} million rows of 16 is {every:.2f} times as fast as one of "
            f"{capacity.SIZES[0]} million, and {few:.2f} times where the ids are those of few rows: what is lost is "
            "lost to caches and page tables, not to the index."
        )
    if record.figures(plan):
        text += (
            " For the paper's largest run, 100 trillion parameters at 1.92 million samples/s, the planner computes "
            f"<{plan}#price_per_hour|,.0f> dollars an hour, <{plan}#price_per_billion_samples|,.0f> for a billion "
            "samples, at prices of 2023."
        )
    return text


def _sizes(record: Record) -> Iterator[Plot]:
    """Yield the chart of one table by its size."""
    sizes = {size: record.figures(f"capacity/size/{size}M") for size in capacity.SIZES}
    by_size = {size: figures for size, figures in sizes.items() if figures}
    if len(by_size) < 2:
        return
    kinds = {"all": "ids of all its rows", "few": f"ids of {capacity.HOT_ROWS:,} rows"}
    lines = [
        Line(name=name, points=[(size, f["rows_per_s"][kind] / 1e6) for size, f in by_size.items()], colour=at)
        for at, (kind, name) in enumerate(kinds.items())
    ]
    grown = [(size, f["grown_rows_per_s"] / 1e6) for size, f in by_size.items()]
    lines.append(Line(name="new rows, while it grows", points=grown, colour=2))
    yield Chart(
        title="One table of dim 16, by its size", x="rows, millions", y="million rows/s", lines=lines, log_x=True,
        low=0.0, x_ticks=capacity.SIZES, slug="sizes",
    )  # fmt: skip


# -- the others ----------------------------------------------------------------------------------------


def _reuse(record: Record) -> Iterator[Section]:
    rows = []
    gaps: dict[str, list[tuple[float, float]]] = {"all ids": [], "cold ids": []}
    for name, features in record.below("reuse/").items():
        values = list(features.values())
        means = [fmean(each["shares"][at] for each in values) for at in range(3)]
        cold = [each["cold"][1] for each in values if each["cold"][1] is not None]
        gap = record.figures(f"convergence/curve/{name}/hybrid 4")
        row = [name, f"{max(each['alpha'] for each in values):.2f}", *(f"{mean:.0%}" for mean in means)]
        row += [f"{fmean(cold):.0%}" if cold else "-", f"{gap['difference']['mean']:+.4f}" if gap else "-"]
        rows.append(row)
        if gap:
            gaps["all ids"].append((100 * means[1], gap["difference"]["mean"]))
        if gap and cold:
            gaps["cold ids"].append((100 * fmean(cold), gap["difference"]["mean"]))
    text = (
        "The share of a batch's distinct ids that the last 1, 4 and 16 batches of 256 contained, in the mean of the "
        "features: these lookups miss an update at that staleness. Alpha is the share of samples that the most "
        "frequent id of any feature is in; cold ids are in less than 1 % of the samples. `satrap doctor FILES` "
        "prints the same for each feature of your files."
    )
    header = ("data", "largest alpha", "last 1", "last 4", "last 16", "cold, last 4", "AUC of hybrid 4 - synchronous")
    lines = [Line(name=kind, points=sorted(gaps[kind]), colour=at) for at, kind in enumerate(gaps)]
    chart = Chart(
        title="What staleness 4 costs, by reuse", x="distinct ids that the last 4 batches contained, %",
        y="AUC of hybrid 4 minus synchronous", lines=lines, slug="reuse",
    )  # fmt: skip
    if rows:
        plots = [chart] if min(map(len, gaps.values())) > 1 else []
        yield Section(title="Reuse of ids", kind="measured", paragraphs=[[text]], plots=plots, header=header, rows=rows)


def _campaign(record: Record) -> Iterator[Section]:
    kills, flips = record.figures("campaign/kills"), record.figures("campaign/bytes")
    if not kills or not flips:
        return
    runs, saved, network_runs = "campaign/kills", "campaign/bytes", "campaign/packets"
    text = (
        f"<{runs}#kills.server|,> servers and <{runs}#kills.trainer|,> trainers were killed (SIGKILL) in "
        f"<{runs}#runs|,> runs; <{runs}#same_bits|,> of these ended with the bits of a run without faults. "
        f"<{saved}#flips|,> bits were flipped in saved tables, one at a time: <{saved}#refused|,> times the table was "
        "refused, and any other time it was unchanged."
    )
    if record.figures(network_runs):
        text += (
            " Training over a network that loses a fifth of the packets, and delays, doubles and reorders others, "
            f"ended with the right rows in all of <{network_runs}#runs|,> runs."
        )
    bars = [(f"{role}s killed, survived", float(count)) for role, count in kills["kills"].items()]
    bars.append(("flipped bits, refused", float(flips["refused"])))
    chart = Bars(
        title="Faults survived", value="faults", bars=[(name, n, n, n) for name, n in bars], text="{:,.0f}".format,
        slug="faults",
    )  # fmt: skip
    yield Section(title="Reliability", kind="measured", paragraphs=[record.text(text)], plots=[chart])


def _baselines(record: Record) -> Iterator[Section]:
    plots = []
    for name in dict.fromkeys(key.split("/")[0] for key in record.below("baselines/")):
        aucs = {key: figures["auc"] for key, figures in record.below(f"baselines/{name}/").items()}
        for label, cell in (
            ("plain torch", f"control/{name}/sync"),
            ("Satrap, synchronous", f"curve/{name}/sync"),
            ("Satrap, hybrid 4", f"curve/{name}/hybrid 4"),
        ):
            if figures := record.figures(f"convergence/{cell}"):
                aucs[label] = figures["auc"]
        low = round(min(auc["low"] for auc in aucs.values()) - 0.02, 2)
        bars = [(key, auc["mean"], auc["low"], auc["high"]) for key, auc in aucs.items()]
        value = "AUC, with the 95 % interval of the seeds"
        title, slug = f"{name}: AUC on the test part", f"baselines-{name}"
        plots.append(Bars(title=title, value=value, bars=bars, text="{:.4f}".format, low=low, slug=slug))
    if plots:
        text = (
            "All models have the same split and are tuned on the validation part only. LightGBM, where it is "
            "installed, sees ids as categories."
        )
        yield Section(title="Is the model any good?", kind="measured", paragraphs=[[text]], plots=plots)


def _devices(record: Record) -> Iterator[Section]:
    figures = record.figures("devices/published")
    if not figures or not record.figures("devices/ablation"):
        return
    rows = [
        [name, f"{f['model'] / 1e6:.1f} M", f"{f['published'] / 1e6:.2f} M", f"{f['model'] / f['published']:.2f}"]
        for name, f in figures["samples_per_s"].items()
    ]
    without = "devices/ablation"
    text = (
        "No GPU was at hand: these figures are a model from the A100's data sheet, the bytes and products of a "
        "sample and usual shares of both, beside what NVIDIA published for its DLRM of 4.2 (small, one A100) and 113 "
        "billion parameters (large, eight). The model has neither a reader nor skew between GPUs, so for eight it is "
        "a bound. Satrap's host would resolve the ids of <devices/published#host_samples_per_s|,.0f> samples/s on 16 "
        "cores, from the measured rate of one thread. By the model, a step of the small one takes "
        f"<{without}#mixed precision|.2f> times as long without mixed precision, <{without}#fused tables|.2f> without "
        f"fused tables and <{without}#compilation|.2f> without compilation; NVIDIA's article reports gains of 23 %, "
        "39 % and 3.36 times for such changes."
    )
    header = ("setting", "model, samples/s", "published, samples/s", "model / published")
    kind = "computed by a model; none was measured on a GPU"
    yield Section(title="NVIDIA's figures", kind=kind, paragraphs=[record.text(text)], header=header, rows=rows)
