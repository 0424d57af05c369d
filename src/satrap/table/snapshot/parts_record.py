"""parts.json: which snapshots a table's folder under a URL holds, and in which subfolders.

On a disk the folder itself says so: there are subfolders "k-of-n", and each holds the one manifest that a rename put
there. Under a URL lists may lag, and a server that was replaced may still be writing. So each snapshot's manifest has a
name that is never used again, and this object names those that count. One process writes it, after all manifests.
"""

from collections.abc import Sequence
from typing import Any

from satrap.config.durable import json_checksum, json_with_checksum, parse_json
from satrap.config.regular_file import MAX_JSON_BYTES
from satrap.errors import SnapshotError
from satrap.storage.folder import Folder

PARTS = "parts.json"
_FORMAT, _FORMAT_VERSION = "satrap-table-parts", 1


def write_record(folder: Folder, parts: Sequence[dict[str, Any]]) -> None:
    """Record which snapshots are the parts of the table in the folder. Readers ignore other snapshots there.

    parts: `SavedPart.to_dict()` of each.
    """
    content = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "parts": list(parts)}
    folder.write(PARTS, json_with_checksum(content) + b"\n")


def read_record(folder: Folder) -> list[dict[str, Any]] | None:
    """Return what `write_record` wrote; None if the folder has no such record."""
    where = f"{folder}/{PARTS}"
    try:
        data = folder.read(PARTS, MAX_JSON_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SnapshotError(f"{where} cannot be read: {error.strerror}") from error
    try:
        content = parse_json(data)
        if (content["format"], content["format_version"]) != (_FORMAT, _FORMAT_VERSION):
            raise SnapshotError(
                f"{where} is of format {content['format']!r} version {content['format_version']!r}; expected "
                f"{_FORMAT!r} version {_FORMAT_VERSION}"
            )
        if content["crc32c"] != json_checksum(content):
            raise SnapshotError(f"{where} is damaged: its checksum does not match")
        return [{"folder": str(part["folder"]), "id": str(part["id"]), **part} for part in content["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{where} cannot be read ({error}): torn, or not of a Satrap table") from error
