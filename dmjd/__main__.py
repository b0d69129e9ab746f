"""Run the command line with ``python -m dmjd``."""

import sys

from dmjd.cli import main

sys.exit(main())
