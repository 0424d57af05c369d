"""What a user declares: tables, features, columns, and the job that all processes agree on; and the checks of input."""
