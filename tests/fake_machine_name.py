"""How a run is told which machine it meets; imports nothing that pretends."""

from __future__ import annotations

VARIABLE = "GPUMEM_TEST_MACHINE"
PLUGIN = ("-p", "tests.fake_machine")
