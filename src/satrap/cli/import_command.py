"""`satrap import`: saves pretrained vectors as the snapshot of a table, which a `Reader` opens."""

import argparse
from collections.abc import Iterator

from satrap.cli.options import Commands, add_choice, location_option, path_option
from satrap.config.tables import Table
from satrap.errors import ConfigError, InputError


def add_import(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "import",
        help="write pretrained vectors into a table's snapshot",
        description="Read vectors from a .npy, .safetensors or Parquet file and save them as a table's snapshot, which "
        "satrap.Reader opens. A job starts from it with embeddings.tables[NAME].write(ids, rows.values) for each part "
        "of Reader(FOLDER).tables[NAME].rows().",
        epilog="Example: satrap import items.parquet pretrained/item --table item --ids item_id --vectors embedding",
    )
    parser.add_argument("file", type=path_option, metavar="FILE", help=".npy, .safetensors or Parquet file of vectors")
    parser.add_argument("folder", type=location_option, metavar="FOLDER", help="folder or URL of the snapshot")
    parser.add_argument("--table", required=True, metavar="NAME", help="name of the table")
    parser.add_argument(
        "--ids",
        metavar="NAME",
        help="column of the ids of a Parquet file (default: id), tensor of a .safetensors file, or .npy file; without "
        "it, the ids of a .safetensors or .npy file are the numbers of its rows",
    )
    parser.add_argument(
        "--vectors",
        metavar="NAME",
        help="column (default: vector), or tensor if the file has several of two dimensions",
    )
    add_choice(parser, "--dtype", "type of the stored values", ("float32", "float16", "bfloat16"))
    parser.add_argument("--force", action="store_true", help="replace what FOLDER holds")


def import_vectors(options: argparse.Namespace) -> Iterator[str]:
    """Carry out the command; yield what it prints."""
    from satrap.data.vectors import read_vectors
    from satrap.storage.open_folder import open_folder
    from satrap.table.store import Store

    names = sorted(open_folder(options.folder).names())
    if names and not options.force:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ConfigError(
            f"{options.folder} exists and holds {shown}; expected a new folder: name another, or replace it with "
            "--force"
        )
    store: Store | None = None
    for ids, values in read_vectors(options.file, ids=options.ids, vectors=options.vectors):
        if store is None:
            store = Store(Table(options.table, values.shape[1], dtype=options.dtype))
        before = len(store)
        try:
            store.write(ids, values)
        except InputError as error:
            raise InputError(f"{options.file}: {error}") from error
        if len(store) != before + len(ids):
            raise InputError(f"{options.file}: some ids occur twice; expected one vector for each id")
    if store is None:
        raise InputError(f"{options.file} has no vector")
    store.save(options.folder)
    yield f"{options.folder}: table {options.table!r}, {len(store)} rows of dim {store.table.dim}"
