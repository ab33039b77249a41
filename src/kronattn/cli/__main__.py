"""``python -m kronattn.cli`` is the ``kronattn`` command."""

import sys

from kronattn.cli import main

sys.exit(main())
