"""Names that give a pytest run a fake machine; importing this module fakes nothing."""

from __future__ import annotations

VARIABLE = "GPUMEM_TEST_MACHINE"
PLUGIN = ("-p", "tests.fake_machine")
