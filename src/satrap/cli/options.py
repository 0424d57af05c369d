"""Options that several commands of `satrap` have, and the kinds of options: numbers, files, places, addresses."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from satrap.config.location import Location, local_path
from satrap.errors import ConfigError
from satrap.event_log import FORMATS

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
Group: TypeAlias = argparse._ActionsContainer


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


def add_number(
    group: Group, option: str, what: str, default: float | None = None, *, metavar: str = "N", kind: Any = int
) -> None:
    """Add an option with a number, and its default to the help. kind: float for others than integers."""
    group.add_argument(option, type=kind, default=default, metavar=metavar, help=_with_default(what, default))


def add_path(group: Group, option: str, what: str, default: str | None = None, *, metavar: str = "FILE") -> None:
    """Add an option with a local path, and its default to the help."""
    path = None if default is None else Path(default)
    group.add_argument(option, type=path_option, default=path, metavar=metavar, help=_with_default(what, path))


def add_choice(group: Group, option: str, what: str, choices: tuple[str, ...]) -> None:
    """Add an option with a word, by default the first of the choices."""
    group.add_argument(option, choices=choices, default=choices[0], help=_with_default(what, choices[0]))


def add_names(group: Group, option: str, what: str, *, metavar: str = "ADDRESS", **options: Any) -> None:
    """Add an option with several words, which may be repeated."""
    group.add_argument(option, nargs="+", action="extend", default=[], metavar=metavar, help=what, **options)


def add_split(group: Group) -> None:
    """Add --split, whose words `separators_in` reads."""
    add_names(
        group,
        "--split",
        "columns of text that list ids, each with the character between the ids, such as tags='|' (default: inferred); "
        "tags= if each text is one id",
        metavar="COLUMN=CHARACTER",
    )


def separators_in(words: Sequence[str]) -> dict[str, str]:
    """Return the separator of each column in the words of --split; empty: each text is one id."""
    separators = {}
    for word in words:
        name, equals, separator = word.partition("=")
        if not name or not equals or len(separator) > 1 or not separator.isascii():
            raise ConfigError(f"--split: found {word!r}; expected COLUMN= and one ASCII character, such as tags='|'")
        separators[name] = separator
    return separators


def add_permitted(group: Group, option: str, what: str) -> None:
    """Add an option with a folder or URL, which may be repeated."""
    group.add_argument(option, action="append", type=location_option, default=[], metavar="DIR|URL", help=what)


def add_folder(group: Group, what: str) -> None:
    add_path(group, "--folder", what, "satrap-run", metavar="DIR")


def add_http(group: Group, more: str) -> None:
    group.add_argument(
        "--http",
        metavar="[HOST:]PORT[-LAST]",
        help="serve /metrics for Prometheus, /healthz and /readyz at this port, or the first free one up to LAST; "
        f"port 0 chooses any free one (default host: loopback){more}",
    )


def add_log_format(group: Group) -> None:
    add_choice(group, "--log-format", "form of the log's lines, on standard error and in log files", FORMATS)


def add_keys(group: Group) -> None:
    add_path(group, "--keys", "path of client.key; required for servers with keys")


def add_changes(group: Group, what: str) -> None:
    group.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"replace a value of {what}; may be repeated",
    )


def _with_default(what: str, default: object) -> str:
    return what if default is None else f"{what} (default: %(default)s)"


def in_options(message: str) -> str:
    """Return a message of a source for someone who typed a command: with the option in place of a setting, or the
    setting's place in a script if there is none."""
    message = message.replace("max_bad_rows", "--max-bad-rows")
    settings = re.search(r"(?<!\()\b(encoding|columns|quote|newlines_in_values)=", message)
    if settings is None:
        return message
    message += f"; {settings[0]} is an argument of satrap.CSV in a script, for which this command has no option"
    if settings[1] == "encoding":
        message += ": convert the file, such as by iconv -f latin1 -t utf-8 FILE > NEW"
    return message
