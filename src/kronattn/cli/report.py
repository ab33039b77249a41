"""``kronattn report``."""


def report() -> None:
    """Write the report."""
    raise ValueError("being written")
