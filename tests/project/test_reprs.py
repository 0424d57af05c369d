"""What an interactive session shows of the objects of a run: short, and the parts that a user asks for first."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch

import satrap
from cluster import running_servers, sharded_worker
from satrap.config.features import Features


def test_sources_show_their_path_and_what_differs_from_the_defaults() -> None:
    price = satrap.DenseColumn("price", log1p=True)
    data = satrap.Parquet("clicks/", dense=["age", price], label="click", ids={"last": "history"}, batch_size=512)
    assert repr(data) == (
        f"Parquet('clicks/', dense=('age', {price!r}), label='click', ids={{'last': 'history'}}, batch_size=512)"
    )
    assert repr(data.replace(path="test/", epochs=None)).startswith("Parquet('test/', dense=('age', DenseColumn(")
    assert repr(satrap.CSV("x.csv", columns=["a", "b"], strip=True)) == "CSV('x.csv', columns=('a', 'b'), strip=True)"
    assert repr(satrap.Frame({"a": [1]}, label="a", batch_size=4)) == "Frame(label='a', batch_size=4)"
    assert repr(satrap.IterableSource([{"a": [1]}], label="a")) == "IterableSource(a list, label='a')"
    assert repr(satrap.IterableSource(tuple, batch_size=4)) == "IterableSource(tuple, batch_size=4)"


def test_objects_of_a_run_show_their_state(tmp_path: Path) -> None:
    item = satrap.Table("item", dim=4)
    features: dict[str, satrap.Feature | satrap.Table] = {
        "item": item,
        "seen": item.bag("mean", weighted=True),
        "last": item.sequence(2),
    }
    assert repr(Features(features)) == (
        "Features(item: item[4], seen: item[4].bag('mean', weighted=True), last: item[4].sequence(2))"
    )
    inputs = satrap.Inputs(names=("item",), values=np.arange(6, dtype=np.uint64), batch_size=6, label=np.zeros(6, "f4"))
    assert repr(inputs) == "Inputs(6 samples, 6 ids of ['item'], label [6])"
    embeddings = satrap.Embeddings({"item": item})
    assert {"stream", "optimizer", "tables", "features", "staleness", "step", "train", "eval"} <= set(dir(embeddings))
    assert not {"register_buffer", "named_modules", "xpu"} & set(dir(embeddings))
    model = torch.nn.Linear(4, 1)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert repr(optimizer) == "HybridOptimizer(SGD: lr=0.1, tables: item: lr=0.01)"
    assert repr(embeddings.trainers) == "ProcessGroup(rank=0, world_size=1)"
    run = satrap.Checkpoint(tmp_path / "run", model, optimizer, embeddings)
    assert repr(run) == f"Checkpoint({str(tmp_path / 'run')!r}, nothing saved or resumed yet)"
    with satrap.Progress(embeddings, []) as progress:
        for batch in embeddings.stream([inputs, inputs]):
            model(batch.embeddings).sum().backward()
            optimizer.step()
            progress.step(batch)
        assert repr(progress) == "Progress(step 2, 12 samples)"
    assert repr(progress) == "Progress(step 2, 12 samples, closed)"
    with embeddings.stream([inputs]) as stream:
        assert repr(stream) == "Stream(trains, next step 3)"
    validation = satrap.Validation(model, embeddings, satrap.Frame({"item": [1], "label": [1.0]}, label="label"))
    assert repr(validation) == "Validation(auc, nothing evaluated yet)"
    run.save()
    assert repr(run) == f"Checkpoint({str(tmp_path / 'run')!r}, step 2 saved or resumed)"
    assert repr(embeddings.tables) == "TableGroup(item: 6 rows)"


def test_the_screen_shows_its_form() -> None:
    assert repr(satrap.Screen(io.StringIO())) == "Screen(lines, every_seconds=10)"
    assert repr(satrap.Screen(io.StringIO(), as_bar=True)).startswith("Screen(a bar, every_seconds=")


def test_a_name_that_is_not_there_is_an_error_that_names_the_nearest() -> None:
    with satrap.Embeddings({"item_id": satrap.Table("item", dim=4)}) as embeddings:
        with pytest.raises(KeyError, match="there is no table 'itme'; the nearest known one is 'item'"):
            embeddings.tables["itme"]
        with pytest.raises(KeyError, match="there is no feature 'user'; known are 'item_id'"):
            embeddings.features["user"]
        assert "itme" not in embeddings.tables and embeddings.tables.get("itme") is None


def test_declarations_show_what_differs_from_the_defaults() -> None:
    item = satrap.Table("item", 4, num_rows=9)
    assert repr(item) == "Table('item', 4, num_rows=9)"
    assert repr(item.bag("mean")) == "Feature(Table('item', 4, num_rows=9), pooling='mean')"
    last = item.sequence(2, padding_id=0)
    assert repr(last) == f"Feature({item!r}, pooling='none', max_length=2, keep='last', padding_id=0)"
    assert repr(satrap.Table("user", 2, admission=satrap.MinCount(3))).startswith(
        "Table('user', 2, admission=MinCount(n=3"
    )


def test_tables_on_servers_show_their_names_without_a_call() -> None:
    features = Features({"a": satrap.Table("item", 4)})
    with running_servers(1) as (server,):
        with sharded_worker(features, [server.address]) as worker:
            tables = worker.tables
        assert repr(tables) == "ShardedTables(item)" and repr(tables["item"]) == "ShardedTable('item', dim=4)"


def test_stores_list_no_private_names() -> None:
    with satrap.Embeddings({"item": satrap.Table("item", dim=4)}) as embeddings:
        for listed in (dir(embeddings.tables["item"]), dir(embeddings.tables)):
            assert {"__len__", "lookup"} <= set(listed)
            assert not [name for name in listed if name.startswith("_") and not name.startswith("__")]
        bag = satrap.nn.EmbeddingBag(embeddings, "item", padding_idx=0)
        assert repr(bag) == "EmbeddingBag('item', 4, padding_idx=0, mode='mean')"


def test_sequences_show_their_shapes() -> None:
    item = satrap.Table("item", dim=4)
    with satrap.Embeddings({"last": item.sequence(2), "past": item.sequence()}) as embeddings:
        visits = {"last": [[1], [2, 3]], "past": [[1], [2, 3]]}
        data = satrap.Frame(visits, batch_size=2)
        embeddings.optimizer()
        batch = next(embeddings.stream(data))
        assert repr(batch["last"]) == "Sequence(values=[2, 2, 4], 3 rows)"
        assert repr(batch["past"]) == "JaggedSequence(values=[3, 4], 2 samples)"
