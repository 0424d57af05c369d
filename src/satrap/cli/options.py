"""Options that several commands of `satrap` have."""

import argparse
from pathlib import Path
from typing import Any, TypeAlias

from satrap.config.location import Location, local_path
from satrap.errors import ConfigError
from satrap.event_log import FORMATS

Commands: TypeAlias = "argparse._SubParsersAction[Any]"


def path_option(text: str) -> Path:
    """Return the local path that an option names."""
    try:
        return local_path(text, "the path")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def location_option(text: str) -> str:
    """Return the path or URL that an option names."""
    try:
        return str(Location.parse(text, "the path"))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_folder(group: argparse._ActionsContainer, what: str) -> None:
    group.add_argument(
        "--folder",
        type=path_option,
        default=Path("satrap-run"),
        metavar="DIR",
        help=f"{what} (default: %(default)s)",
    )


def add_http(command: argparse._ActionsContainer, more: str) -> None:
    command.add_argument(
        "--http",
        metavar="[HOST:]PORT[-LAST]",
        help="serve /metrics for Prometheus, /healthz and /readyz at this port, or the first free one up to LAST; "
        f"port 0 chooses any free one (default host: loopback){more}",
    )


def add_log_format(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="form of the log's lines, on standard error and in log files (default: %(default)s)",
    )


def add_keys(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--keys", type=path_option, metavar="FILE", help="path of client.key; required for servers with keys"
    )


def add_changes(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"replace a value of {what}; may be repeated",
    )
