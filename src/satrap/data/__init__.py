"""Training data: declared sources, read ahead and assembled into batches of `Inputs`."""
