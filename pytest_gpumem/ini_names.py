"""Names in the ini file: pytest only warns of one that is not registered."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

PREFIX = "gpumem_"


def check_names(config: pytest.Config, known: Collection[str]) -> None:
    """Raise ``pytest.UsageError`` for a setting of ours that is not ``known``.

    A misspelt limit would check nothing, and its tests would pass.
    """
    # pytest 9 has made it private, and there is no other way to see names that are not registered.
    given: Iterable[str] | None = getattr(config, "_inicfg", None)
    for name in config.inicfg if given is None else given:
        if name.startswith(PREFIX) and name not in known:
            from difflib import get_close_matches

            from pytest_gpumem.echo import quoted

            # Without the common prefix, which makes any two alike.
            words = [word.removeprefix(PREFIX) for word in known]
            close = get_close_matches(name.removeprefix(PREFIX), words, n=1)
            meant = f"did you mean {PREFIX}{close[0]}?" if close else "see pytest --help"
            where = config.inipath or "--override-ini"
            raise pytest.UsageError(
                f"{where}: {quoted(name)} is no setting of pytest-gpumem; {meant}"
            )
