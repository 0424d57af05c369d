"""A job for an installed wheel, which `make wheel` runs outside the repository: trains, saves, resumes, compares.

It also checks the content of the wheel: the licences of the libraries compiled into it, and the command.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import satrap
from satrap.data.synthetic import Clicks

NOTICES = ("LICENSE", "LICENSES/nanobind.txt", "LICENSES/robin_map.txt")


def train(folder: Path, steps: int) -> tuple[int, torch.Tensor]:
    """Train from the newest checkpoint up to `steps`; return the step at which it resumed, and the logits of the test
    data."""
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Clicks(num_samples=1280, cardinalities=1000).write_criteo(folder / "clicks.txt")
        assert train(folder, 10)[0] == 0
        began, resumed = train(folder, 20)
        assert began == 10, f"the job resumed after step {began}, expected 10"
        shutil.rmtree(folder / "run")
        assert torch.equal(resumed, train(folder, 20)[1]), "a resumed job differs from one that was never interrupted"
    command = Path(sys.executable).with_name("satrap")
    print(
        subprocess.run([str(command), "doctor", "--no-run"], capture_output=True, text=True, check=True).stdout, end=""
    )
    print(f"satrap {satrap.__version__} from {place.parent}: trained, saved and resumed, without a compiler")


if __name__ == "__main__":
    main()
