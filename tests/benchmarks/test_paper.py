"""`python -m benchmarks.paper`: its parts equal Satrap's behaviour, and its pages equal the record."""

import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.cluster.processes import satrap_server
from benchmarks.paper import __main__ as command
from benchmarks.paper import campaign, samples, theory, training
from benchmarks.paper.cell import CannotRunError, Cell, Done, Figures
from benchmarks.paper.network import DEVICE_SECONDS, LINK, MODES, POINTS
from benchmarks.paper.page import Record, files, html, look_up, markdown
from benchmarks.paper.sections import sections
from benchmarks.paper.simulation import Coefficients, Simulation, validate

import satrap
from browser import find_browser, running_browser

ROOT = Path(__file__).parents[2]
NEWEST = max((ROOT / "benchmarks" / "results").glob("paper-*.jsonl"))


@pytest.fixture(scope="module")
def record() -> Record:
    return Record(command.read(NEWEST))


# -- the parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0, 3])
def test_the_theory_trains_as_satrap_does(tau: int) -> None:
    problem = theory.draw(8, 0.0, 200)
    gamma, num_steps, batch = 0.1, 25, 4
    _, expected = theory.errors(problem, gamma, tau, late_dense=False, num_steps=num_steps, batch=batch, seed=5)
    table = satrap.Table("ids", dim=1, optimizer=satrap.SGD(lr=gamma), initial=satrap.Zeros())
    embeddings = satrap.Embeddings({"ids": table.bag("sum")}, staleness=tau, deterministic=True)
    dense = torch.nn.Parameter(torch.zeros(theory.NUM_DENSE))
    optimizer = embeddings.optimizer(torch.optim.SGD([dense], lr=gamma))
    random, batches = np.random.default_rng(5), []
    for _ in range(num_steps):
        picked = random.integers(0, 200, batch)
        ids = [np.flatnonzero(row[:8]) for row in problem.inputs[picked]]
        batches.append(
            satrap.Inputs(
                names=("ids",), values=np.concatenate(ids).astype(np.uint64), batch_size=batch,
                offsets=np.arange(0, 4 * batch + 1, 4), dense=problem.inputs[picked, 8:].astype(np.float32),
                label=problem.signs[picked].astype(np.float32),
            )
        )  # fmt: skip
    for each in embeddings.stream(batches, overlap=False):
        margins = each.label * (each.embeddings.squeeze(1) + each.dense @ dense)
        optimizer.zero_grad()
        torch.nn.functional.softplus(-margins).mean().backward()
        optimizer.step()
    embeddings.drain()
    rows = embeddings.tables["ids"].lookup(np.arange(8, dtype=np.uint64), train=False)
    np.testing.assert_allclose(np.append(rows, dense.detach().numpy()), expected, atol=1e-5)


@pytest.mark.parametrize("mode", ["hybrid", "async"])
def test_errors_are_below_the_bound(mode: str) -> None:
    problem = theory.draw(8, 1.1, 200)
    alpha = problem.alpha if mode == "hybrid" else 1.0
    for tau in (0, 5, 40):
        gamma = theory.rate(problem, tau, alpha, 300, 4)
        error, _ = theory.errors(problem, gamma, tau, late_dense=mode == "async", num_steps=300, batch=4, seed=1)
        assert 0 < error <= theory.bound(problem, gamma, tau, alpha, 300, 4)


def test_late_training_equals_that_of_a_server() -> None:
    """With one trainer, rows and dense parameters are as late as with dense="async" at the same staleness."""
    split = samples.load("synthetic", None, 2000)
    setting = training.Setting(mode="async 2", trainers=1, batch=32)
    assert setting.delay == 2 and training.Setting(mode="async 4").delay == 19
    part = split.train.part(slice(640))
    with training.one_thread(), satrap_server(1) as (address, _):
        model = training.build(setting, split, 1)
        training._train_satrap(model, part, 32)
        torch.manual_seed(1)
        net = training.network(setting, split.train)
        assert model.embeddings is not None
        table = model.embeddings.features.tables[0]
        with satrap.Embeddings(
            dict.fromkeys(samples.feature_names(part), table), staleness=2, deterministic=True, seed=1, dense="async",
            deployment=satrap.Deployment([address]),
        ) as embeddings:  # fmt: skip
            optimizer = embeddings.optimizer(torch.optim.Adam(net.parameters(), lr=setting.dense_lr))
            for batch in embeddings.stream(part.batches(32), overlap=False):
                logits = net(torch.cat([batch.dense, batch.embeddings], 1)).squeeze(1)
                optimizer.zero_grad()
                torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
                optimizer.step()
            embeddings.drain()
            for ours, theirs in zip(model.net.parameters(), net.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_the_control_learns_what_satrap_learns() -> None:
    split = samples.load("synthetic", None, 6000)
    for mode in ("sync", "hybrid 4", "async 1"):
        aucs = [
            training.train(training.Setting(mode=mode, contender=contender), split, 0)["auc"]
            for contender in ("satrap", "torch")
        ]
        assert abs(aucs[0] - aucs[1]) < 0.05 and min(aucs) > 0.45


def test_a_simulated_step_is_the_sum_of_its_parts() -> None:
    costs = Coefficients(
        device=0.02,
        host=0.001,
        server=0.002,
        latency=0.001,
        ids=1e4,
        rows=1e5,
        gradients=2e5,
        dense=0.0,
        rate=1e7,
        delay=0.002,
        phase=0.005,
    )
    waits = 4 * 0.002 + 2 * 0.003 + (1e4 + 1e5 + 2e5 + 200) / 1e7
    assert Simulation(costs, 1, 1, "sync").run() == pytest.approx(0.021 + waits)
    assert Simulation(costs, 1, 1, "hybrid 4").run() == pytest.approx(max(0.021, 2.1e5 / 1e7))
    rates = [
        w / Simulation(costs, w, s, mode).run() for mode in ("sync", "hybrid 4") for w, s in ((1, 1), (8, 40), (8, 300))
    ]
    assert rates[0] < rates[1] <= rates[2] and rates[3] < rates[4] <= 1.001 * rates[5] and rates[0] < rates[3]


def test_the_calibration_finds_the_costs() -> None:
    """Points that the simulation itself made are predicted from those of one trainer and one server."""
    costs = Coefficients(
        device=DEVICE_SECONDS, host=0.003, server=0.002, latency=0.004, ids=24e3, rows=2e5, gradients=176e3, dense=7e4,
        rate=LINK.bytes_per_second, delay=LINK.delay_ms / 1e3, phase=0.006,
    )  # fmt: skip
    crossed = {"to_servers": 2e5, "from_servers": 2e5, "between_trainers": 2 * costs.dense}
    done = {
        f"network/point/{w}x{s}/{mode}": {
            "step_ms": 1e3 * Simulation(costs, w, s, mode).run(), "crossed": crossed, "server_ms": 2e3 * costs.server
        }
        for w, s in POINTS
        for mode in MODES
    }  # fmt: skip
    assert validate(done)["worst_error"] < 0.01


def test_published_files(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    counts, words = (random.integers(0, 9, (50, n)) for n in (13, 26))
    (tmp_path / "criteo.txt").write_text(
        "".join(
            "\t".join(["1" if n % 3 else "0", *map(str, counts[n]), *(f"{w:08x}" for w in words[n])]) + "\n"
            for n in range(50)
        )
    )
    lines = [f"{n},{n % 2},141021{n % 24:02},1005,{n % 5}" for n in range(50)]
    (tmp_path / "train.csv").write_text("\n".join(["id,click,hour,C1,site_id", *lines]) + "\n")
    lines = [f"{n % 7},{100 + n},{n % 3},430548_1007,{1 - n % 2},{n % 2}" for n in range(50)]
    (tmp_path / "raw_sample.csv").write_text("\n".join(["user,time_stamp,adgroup_id,pid,nonclk,clk", *lines]) + "\n")
    (tmp_path / "ad_feature.csv").write_text(
        "adgroup_id,cate_id,campaign_id,customer,brand,price\n0,1,2,3,NULL,9.5\n1,1,2,3,4,1\n"
    )
    (tmp_path / "user_profile.csv").write_text("userid,cms_segid,new_user_class_level \n1,5,3\n2,6,\n")
    for name, path, num_ids in (("criteo", "criteo.txt", 26), ("avazu", "train.csv", 3), ("taobao", "", 9)):
        split = samples.load(name, str(tmp_path / path), 40)
        parts = (split.train, split.validation, split.test)
        assert [sum(map(len, parts)), len(split.test)] == [40, 8] and split.train.ids.shape[1] == num_ids, name
        assert all(np.isfinite(part.dense).all() and set(part.label) <= {0.0, 1.0} for part in parts)
        columns = np.concatenate([part.ids for part in parts]).T
        assert sorted(np.unique(columns)) == list(range(split.num_ids))
        assert sum(len(np.unique(column)) for column in columns) == split.num_ids, "no two features share an id"


def test_flipped_bits_are_refused() -> None:
    figures = campaign.flips(5, 1, {})
    assert figures["flips"] == 5 and figures["refused"] > 0


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_run_continues_where_it_ended(tmp_path: Path) -> None:
    calls = defaultdict[str, int](int)

    def run(name: str, done: Done) -> Figures:
        calls[name] += 1
        if name == "c" and calls[name] == 1:
            raise CannotRunError("no network")
        return {"value": sum(each["value"] for each in done.values()) + 1}

    cells = [Cell(name, 1, "measured", lambda done, name=name: run(name, done)) for name in "abc"]  # type: ignore[misc]
    path = tmp_path / "record.jsonl"
    command.run(cells[:1], path, full=False)
    with path.open("a") as file:
        file.write('{"case": "b", "figu')  # killed while it wrote
    lines = command.run(cells, path, full=False)
    assert lines["b"]["figures"] == {"value": 2} and lines["c"]["missing"] == "no network"
    lines = command.run(cells, path, full=False)
    assert lines["c"]["figures"] == {"value": 4} and dict(calls) == {"a": 1, "b": 1, "c": 2}
    assert command.run(cells[:1], path, full=True)["a"]["figures"] == {"value": 1}, "another length is another record"


@pytest.mark.parametrize("arguments", [["--only", "luck"], ["--data", "criteo=/none"], ["--data", "clicks=."]])
def test_misuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert "expected" in (err := capsys.readouterr().err) or "invalid choice" in err


# -- the pages ---------------------------------------------------------------------------------------------------------


class Claims(HTMLParser):
    """The claims of a page: source, value and text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[str]] = []
        self._is_open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_open = tag == "data"
        if self._is_open:
            values = dict(attrs)
            self.found.append([str(values["data-source"]), str(values["value"])])

    def handle_data(self, data: str) -> None:
        if self._is_open:
            self.found[-1].append(data)
            self._is_open = False


def test_every_claim_is_in_the_record(record: Record) -> None:
    page = html(record, sections(record))
    claims = Claims()
    claims.feed(page)
    assert len(claims.found) > 20
    for source, value, text in claims.found:
        cell, _, path = source.partition("#")
        recorded = look_up(record.lines[cell]["figures"], path)
        assert json.loads(value) == recorded
        shown = float(text.rstrip("%").replace(",", "")) / (100 if text.endswith("%") else 1)
        assert shown == pytest.approx(recorded, rel=0.05, abs=0.006 if "%" in text or abs(recorded) > 0.1 else 6e-5)
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "<img" not in page and "<script" not in page


def test_the_documentation_shows_the_record(record: Record) -> None:
    found = sections(record)
    again = "run python -m benchmarks.paper --docs --out with the newest record"
    assert (ROOT / "docs" / "internals" / "paper.md").read_text() == markdown(record, found), again
    plots = {path.name: path.read_text() for path in (ROOT / "docs" / "figures").glob("paper-*.svg")}
    assert plots == files(found), again


def test_a_page_without_any_record_says_so() -> None:
    assert "No experiment has run yet." in html(Record({}), sections(Record({})))


@pytest.mark.skipif(find_browser() is None, reason="no browser")
def test_the_page_in_a_browser(record: Record, tmp_path: Path) -> None:
    (path := tmp_path / "paper.html").write_text(html(record, sections(record)))
    colours = set()
    with running_browser(tmp_path) as browser:
        for width, scheme in ((1280, "light"), (1280, "dark"), (360, "dark")):
            browser.open(path, width=width, scheme=scheme)
            assert browser.problems == [] and browser.requests == [path.as_uri()]
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
            colours.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            outside = browser.evaluate(
                "[...document.querySelectorAll('svg text')].filter(text => { const a = text.getBoundingClientRect(), "
                "b = text.closest('svg').getBoundingClientRect(); return a.left < b.left - 1 || a.right > b.right + 1 "
                "|| a.bottom > b.bottom + 1 }).map(text => text.textContent)"
            )
            assert outside == [], "labels inside their plots"
    assert len(colours) == 2
