"""Writes docs/cli.md, the help of every command, from the parsers of `satrap`."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from satrap.cli.parser import command_parser

_WIDTH = 100
_INTRODUCTION = """# Command line

The help of every command, as `satrap COMMAND --help` prints it. [Cluster](cluster.md) explains `run`, `scale` and
`status`, [planning](planning.md) `plan`, and [Kubernetes](deploy.md) `deploy`. With `eval "$(satrap completion bash)"`
in `~/.bashrc` (or `zsh` in `~/.zshrc`), Tab completes commands and options.
"""


def main() -> None:
    """Write the page."""
    Path(__file__).with_suffix(".md").write_text(page())


def page() -> str:
    """Return the page."""
    os.environ["COLUMNS"] = str(_WIDTH)
    parts = [_INTRODUCTION]
    parts += [f"## {parser.prog}\n\n```text\n{parser.format_help()}```\n" for parser in _parsers(command_parser())]
    return "\n".join(parts)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of the commands, and of their actions instead of a command that has some."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action._name_parser_map.values()):
                yield from _parsers(each)
            return
    yield parser


if __name__ == "__main__":
    main()
