"""A table in this process: `store` and `table_group`, over the native `engine`; `snapshot` writes and reads it."""
