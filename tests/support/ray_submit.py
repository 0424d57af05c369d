"""Submits a job as `ray job submit` does: `ray_submit.py RAY FOLDER ENTRYPOINT`, where FOLDER is the working directory,
or "" for none.

Uses the class with which Ray's dashboard runs jobs, without the dashboard, which starts a dozen processes. The job runs
on the head. Exits with 0 if the job succeeded, and prints its output.
"""

import asyncio
import sys
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.dashboard.modules.job.job_manager import JobManager
from ray.job_submission import JobStatus

ON_HEAD = {"node:__internal_head__": 0.001}


async def submit(address: str, folder: str, entrypoint: str) -> bool:
    runtime_env = {"working_dir": folder} if folder else {}
    context: Any = ray.init(address, runtime_env=runtime_env, log_to_driver=False)
    environment: dict[str, Any] = {"env_vars": {"GREETING": "hello"}}
    if folder:
        environment["working_dir"] = ray.get_runtime_context().runtime_env["working_dir"]
    manager: Any = JobManager(GcsClient(address=address), f"{context.address_info['session_dir']}/logs")
    job = await manager.submit_job(
        entrypoint=entrypoint, runtime_env=environment if folder else None, entrypoint_resources=ON_HEAD
    )
    while not (status := await manager.get_job_status(job)).is_terminal():
        await asyncio.sleep(0.1)
    print(manager.get_job_logs(job))
    return status is JobStatus.SUCCEEDED


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(submit(*sys.argv[1:])) else 1)
