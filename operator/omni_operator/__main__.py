"""`python -m omni_operator`."""

import sys

from omni_operator.main import main

sys.exit(main())
