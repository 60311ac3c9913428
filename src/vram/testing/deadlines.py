"""How long a contract waits for what ends on its own, whatever the machine does besides: a bound for hangs."""

import os

SOON = float(os.environ.get("VRAM_TEST_SECONDS", "120"))  # seconds
