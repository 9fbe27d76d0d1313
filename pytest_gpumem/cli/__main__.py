"""``python -m pytest_gpumem.cli``: the ``gpumem`` command."""

from __future__ import annotations

import sys

from pytest_gpumem.cli import main

sys.exit(main())
