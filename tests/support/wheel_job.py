"""A job for an installed wheel, which `make wheel` runs outside the repository: trains, saves, resumes, compares. Where
torch is not installed it only looks up and updates rows.

It also checks the content of the wheel: the licences of the libraries compiled into it, and the command.
"""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import satrap

NOTICES = ("LICENSE", "LICENSES/nanobind.txt", "LICENSES/robin_map.txt")


def update_rows() -> None:
    """Look up rows of two tables, and update them, without torch."""
    for dtype in ("float32", "bfloat16"):
        table = satrap.Table("item", dim=8, dtype=dtype, optimizer=satrap.SGD(lr=0.5), initial=satrap.Zeros())
        store = satrap.Store(table, num_threads=2)
        ids = np.array([3, 2**64 - 1, 3, 7], np.uint64)
        assert not store.lookup(ids).any()
        store.update(ids, np.ones((4, 8), np.float32))
        expected = np.repeat(np.array([-1.0, -0.5, -1.0, -0.5], np.float32)[:, None], 8, axis=1)
        assert np.array_equal(store.lookup(ids, train=False), expected) and len(store) == 3
        store.check()


def train_dlrm(folder: Path, steps: int) -> tuple[int, Any]:
    """Train from the newest checkpoint up to `steps`; return the step at which it resumed, and the logits of the test
    data."""
    import torch

    torch.manual_seed(0)
    tables = {f"C{i}": satrap.Table(f"C{i}", dim=8, optimizer=satrap.Adagrad(lr=0.05)) for i in range(1, 27)}
    embeddings = satrap.Embeddings(tables)
    data = satrap.Criteo(folder / "clicks.txt", batch_size=64)
    model = embeddings.parallel(satrap.models.DLRM(13, embeddings, bottom=(16,), top=(16, 1)))
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    run = satrap.Checkpoint(folder / "run", model, optimizer, embeddings, data)
    run.resume()
    began = embeddings.step
    for batch in embeddings.stream(data):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.embeddings), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.save(every_steps=5)
        if embeddings.step == steps:
            break
    embeddings.eval()
    with torch.no_grad():
        return began, torch.cat([model(batch.dense, batch.embeddings) for batch in embeddings.stream(data)])


def main() -> None:
    """Check the installed package."""
    place = Path(satrap.__file__).resolve()
    assert place.is_relative_to(Path(sys.prefix).resolve()), f"satrap is imported from {place}, not from {sys.prefix}"
    assert shutil.which("c++") is None and shutil.which("cc") is None, "this environment has a compiler"
    files = importlib.metadata.files("satrap") or []
    for notice in NOTICES:
        (file,) = [each for each in files if str(each).endswith(f"licenses/{notice}")]
        assert "Copyright" in file.read_text(), f"{notice} has no copyright notice"
    update_rows()
    if has_torch := importlib.util.find_spec("torch") is not None:
        train_and_resume()
    command = Path(sys.executable).with_name("satrap")
    doctor = subprocess.run([str(command), "doctor", "--no-run"], capture_output=True, text=True, check=has_torch)
    print(doctor.stdout, end="")
    done = "trained, saved and resumed" if has_torch else "looked up and updated rows, without torch and"
    print(f"satrap {satrap.__version__} from {place.parent}: {done} without a compiler")


def train_and_resume() -> None:
    """Check that a resumed job has the bits of one that was never interrupted."""
    from satrap.data.synthetic import Clicks

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Clicks(num_samples=1280, cardinalities=1000).write_criteo(folder / "clicks.txt")
        assert train_dlrm(folder, 10)[0] == 0
        began, resumed = train_dlrm(folder, 20)
        assert began == 10, f"the job resumed after step {began}, expected 10"
        shutil.rmtree(folder / "run")
        again = train_dlrm(folder, 20)[1]
        assert resumed.equal(again), "a resumed job differs from one that was never interrupted"


if __name__ == "__main__":
    main()
