"""A table on disk: `manifest`, `directory` and `arrow_files` say what it is; `writer` saves it, `reader` loads it."""
