"""`python -m slime_tandem.cli`."""

import sys

from slime_tandem.cli import main

sys.exit(main())
