"""Rows on a device: how fast ids are resolved on the host, what the kernels reach of the memory's bandwidth, and whole
training steps of NVIDIA's small DLRM. `python -m benchmarks.gpu`; without a GPU the device is the CPU, at small size,
where the kernels are torch's reference."""
