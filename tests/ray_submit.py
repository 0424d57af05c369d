"""Submits a job as `ray job submit` does: `ray_submit.py RAY FOLDER ENTRYPOINT`, where FOLDER is the working directory.

Uses the class with which Ray's dashboard runs jobs, without the dashboard, which starts a dozen processes. Exits with 0
if the job succeeded, and prints its output.
"""

import asyncio
import os
import sys
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.dashboard.consts import RAY_JOB_ALLOW_DRIVER_ON_WORKER_NODES_ENV_VAR
from ray.dashboard.modules.job.job_manager import JobManager
from ray.job_submission import JobStatus


async def submit(address: str, folder: str, entrypoint: str) -> bool:
    os.environ[RAY_JOB_ALLOW_DRIVER_ON_WORKER_NODES_ENV_VAR] = "1"  # only the dashboard knows the head
    context: Any = ray.init(address, runtime_env={"working_dir": folder}, log_to_driver=False)
    copy = ray.get_runtime_context().runtime_env["working_dir"]
    manager: Any = JobManager(GcsClient(address=address), f"{context.address_info['session_dir']}/logs")
    environment = {"working_dir": copy, "env_vars": {"GREETING": "hello"}}
    job = await manager.submit_job(entrypoint=entrypoint, runtime_env=environment)
    while not (status := await manager.get_job_status(job)).is_terminal():
        await asyncio.sleep(0.1)
    print(manager.get_job_logs(job))
    return status is JobStatus.SUCCEEDED


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(submit(*sys.argv[1:])) else 1)
