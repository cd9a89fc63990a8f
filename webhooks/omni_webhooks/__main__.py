"""`python -m omni_webhooks`."""

import sys

from omni_webhooks.main import main

sys.exit(main())
