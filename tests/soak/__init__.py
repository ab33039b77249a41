"""The soak: random cases by the thousand, for as long as you like. See ``python -m tests.soak --help``."""
