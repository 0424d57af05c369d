"""Writes the data that the guides read: Parquet files of random clicks, clicks/train/, clicks/test/ and ads.parquet.

In the folders, a user with an odd id clicks, and one with an even id does not, in nine of ten samples; the other
columns tell nothing. In ads.parquet, all columns but the session tell something.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import satrap


def write_clicks(folder: Path, num: int, seed: int) -> None:
    """Write so many samples to a folder."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    user = rng.integers(0, 50, num)
    columns = {
        "user_id": user,
        "item_id": rng.integers(0, 100, num),
        "history": [rng.integers(0, 100, rng.integers(0, 4)) for _ in range(num)],
        "age": rng.random(num),
        "price": rng.random(num),
        "click": (user % 2 ^ (rng.random(num) < 0.1)).astype(np.int64),
    }
    pq.write_table(pa.table(columns), folder / "part.parquet")


def write_ads(path: Path, num: int) -> None:
    """Write so many samples, whose sessions are different texts."""
    clicks = satrap.synthetic.Clicks(num_samples=num, num_dense=1, num_ids=2, cardinalities=2000)
    clicks.write_parquet(path)
    table = pq.read_table(path).rename_columns(["click", "price", "device", "item"])
    pq.write_table(table.append_column("session_id", [[f"s{n}" for n in range(num)]]), path)


if __name__ == "__main__":
    write_clicks(Path("clicks/train"), 20_000, seed=0)
    write_clicks(Path("clicks/test"), 2_000, seed=1)
    write_ads(Path("ads.parquet"), 60_000)
