"""Rows on a device, measured in one unattended run of some minutes: `python -m benchmarks.gpu`.

    __main__   the parts in their order, each in separate processes that a deadline ends
    results    the folder in which they leave what they measured
    child      such a process: one item of a part after another
    devices    the device: what it is, how large its measurements are, the bandwidth of a copy
    kernels    every kernel against the reference, bit for bit
    bandwidth  kernels beside a plain copy
    training   whole steps of NVIDIA's small DLRM beside plain torch, a profile of them, and rows in two tiers
    roofline   what bounds a step

Without a GPU the device is the CPU and everything is small: a dry run of the script, whose figures say nothing.
"""
