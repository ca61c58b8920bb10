"""`python -m registry.cli` is `kreg`."""

import sys

from registry.cli import main

sys.exit(main())
