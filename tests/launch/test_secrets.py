"""A password among a script's arguments: `satrap run` and what it starts show it nowhere but to the script."""

from __future__ import annotations

import subprocess
from pathlib import Path

from child_processes import SATRAP
from runs import start_run, wait_for_exit
from satrap.monitor.hidden_secrets import HIDDEN
from scrape import get
from waiting import wait_until

SECRET = "hunter2"
SCRIPT = """
import sys, time
from pathlib import Path
import satrap

folder, password = Path(sys.argv[1]), sys.argv[3]
assert password == "{secret}"
with satrap.Progress(None, [], settings={{"db": f"postgres://me:{{password}}@host/x", "password": password}}):
    print("the script runs", flush=True)
    while not (folder / "end").exists():
        time.sleep(0.01)
"""


def test_a_password_is_shown_nowhere(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT.format(secret=SECRET))
    arguments = (str(tmp_path), "--password", SECRET, f"--api-key={SECRET}")
    folder = tmp_path / "run"
    shown: dict[str, str] = {}
    with start_run(tmp_path, script, "--http", "0", arguments=arguments) as run:
        assert run.stderr is not None
        line = next(line for line in iter(run.stderr.readline, "") if "metrics at" in line)
        url = line.split("metrics at ")[1].split(";")[0]
        log = folder / "logs" / "trainer-0.log"
        wait_until(lambda: log.exists() and "the script runs" in log.read_text(), run)
        shown |= {each: get(url.replace("/metrics", each))[1] for each in ("/metrics", "/targets", "/readyz")}
        status = [str(SATRAP), "status", "--folder", str(folder), "--seconds", "0.1"]
        for form in ([], ["--json"]):
            shown[f"status {form}"] = subprocess.run(
                [*status, *form], capture_output=True, text=True, check=True
            ).stdout
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            command = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(tmp_path) in command and " server " in command:
                shown[str(process)] = command
        (tmp_path / "end").touch()
        code, out, err = wait_for_exit(run)
        assert code == 0, err
    shown |= {"out": out, "err": line + err}
    assert subprocess.run([str(SATRAP), "report", str(folder)], check=True, capture_output=True).returncode == 0
    shown |= {str(each): each.read_text(errors="replace") for each in folder.rglob("*") if each.is_file()}
    assert len(shown) > 8 and any("server" in command for name, command in shown.items() if "/proc" in name)
    assert not [name for name, text in shown.items() if SECRET in text]
    report = (folder / "report.html").read_text()
    assert report.count(HIDDEN) >= 4 and "script.py" in report
