"""The package's version, in one place: the build backend and ``kronattn.__version__`` read it."""

__version__ = "0.1.0"
