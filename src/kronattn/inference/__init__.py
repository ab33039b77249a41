"""Networks for inference: the same outputs from fewer operators."""

from kronattn.inference.fuse import fuse, fuse_known, fuse_unsupported_reason

__all__ = ["fuse", "fuse_known", "fuse_unsupported_reason"]
