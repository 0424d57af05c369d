"""What a user declares, and the checks of it: tables, features, columns, the job that all processes agree on."""
