"""The completion script in a real shell: what Tab offers after a command line."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from child_processes import SATRAP, child_process
from pty_screen import pty_screen
from satrap.cli.completion import completion_script
from satrap.cli.main import main
from satrap.cli.parser import command_parser

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="no bash on the PATH")
OFFERS = """
source {script}
offers() {{
  COMP_LINE="$*" COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
  _satrap
  printf '%s\\n' "${{COMPREPLY[@]}}"
}}
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "completion.bash"
    path.write_text(completion_script("bash", command_parser()))
    return path


def offers(script: Path, *words: str) -> list[str]:
    """Return the words that the last one may become; none, if it is completed as a file."""
    code = OFFERS.format(script=script) + 'offers "$@"'
    done = subprocess.run(
        [str(BASH), "--norc", "-uc", code, "bash", "satrap", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_options_and_choices(script: Path) -> None:
    assert offers(script, "ru") == ["run"] and offers(script, "s") == ["scale", "status", "server"]
    assert {"train", "run", "deploy", "completion", "--version"} <= set(offers(script, ""))
    assert offers(script, "run", "job.py", "--trainer-g") == ["--trainer-gpus"]
    assert offers(script, "run", "job.py", "--cluster", "") == ["local", "ray"]
    assert offers(script, "run", "--cluster", "ray", "job.py", "--log-format", "j") == ["json"]
    assert offers(script, "deploy", "") == ["render", "--help"]
    assert offers(script, "deploy", "render", "--target", "kube") == ["kuberay", "kubernetes"]
    assert offers(script, "completion", "") == ["bash", "zsh", "--help"]
    for files in (("run", ""), ("run", "jo"), ("run", "job.py", "--folder", ""), ("run", "job.py", "--", "--ser")):
        assert offers(script, *files) == []


def test_tab_in_a_terminal(tmp_path: Path) -> None:
    """An interactive bash that loads the script as the help says, in a folder with a script."""
    (tmp_path / "train_clicks.py").touch()
    (tmp_path / "rc").write_text(f'PS1="$ "\nPATH="{SATRAP.parent}:$PATH"\neval "$(satrap completion bash)"\n')
    with pty_screen(120) as screen:
        command = [str(BASH), "--rcfile", str(tmp_path / "rc"), "-i"]
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), screen.stream)
        environment = os.environ | {"TERM": "dumb", "HOME": str(tmp_path), "INPUTRC": "/dev/null"}
        with child_process(command, cwd=tmp_path, env=environment, start_new_session=True, **streams):
            screen.wait_for(lambda rows: rows[-1].endswith("$ "))
            screen.type("satrap ru\ttrain_\t--serv\t")
            screen.wait_for(lambda rows: "satrap run train_clicks.py --server" in rows[-1])


def test_zsh_runs_the_script_of_bash(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[1].endswith(texts[0]) and texts[1].startswith("autoload -U +X compinit")
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
