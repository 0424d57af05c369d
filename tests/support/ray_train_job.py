"""A job of Ray Train with servers beside it: `ray_train_job.py RAY FOLDER NUM_BATCHES SERVER...`.

Two workers of a TorchTrainer run the script of `run_job.py` on these servers. At step 23 the second one dies once, so
Ray Train starts both again, and they resume the last checkpoint.
"""

import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchTrainer


def train_on_ray(config: dict[str, Any]) -> None:
    import run_job
    import satrap

    job: Any = run_job

    class Failing(satrap.Checkpoint):
        def save(self, *args: Any, **kwargs: Any) -> Any:
            path = folder / "died"
            if embeddings[0].step == 23 and ray.train.get_context().get_world_rank() == 1 and not path.exists():
                path.touch()
                os._exit(1)
            return super().save(*args, **kwargs)

    def make(*args: Any, **kwargs: Any) -> satrap.Embeddings:
        embeddings.append(satrap.Embeddings(*args, deployment=satrap.Deployment(config["servers"]), **kwargs))
        return embeddings[0]

    embeddings: list[satrap.Embeddings] = []
    folder = Path(config["folder"])
    job.Embeddings, job.Checkpoint = make, Failing
    job.skip_compiler()
    job.main(folder, config["batches"])
    embeddings[0].close()


if __name__ == "__main__":
    _, address, folder, batches, *servers = sys.argv
    environment = {"PYTHONPATH": os.fspath(Path(__file__).parent), "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600"}
    ray.init(address, runtime_env={"env_vars": environment})
    TorchTrainer(
        train_on_ray,
        train_loop_config={"folder": folder, "batches": int(batches), "servers": servers},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="job", storage_path=f"{folder}/train", failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    ).fit()
