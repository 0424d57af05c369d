"""Rows on a device: the core keeps ids and decides, the values and optimizer states are torch tensors."""
