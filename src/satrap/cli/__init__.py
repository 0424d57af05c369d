"""The command `satrap`."""
