"""``python -m kronattn`` is the ``kronattn`` command."""

import sys

from kronattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
