"""Triton kernels of the first and the last stage, forward and backward, and of batch norm with its activation.

Nothing here imports Triton before it is needed: the rest of the library works without it. :mod:`kronattn.ops.plan`
says where the kernels run, :mod:`.operators` makes operators of PyTorch of them.
"""
