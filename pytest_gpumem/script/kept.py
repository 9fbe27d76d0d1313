"""A script in a test, which keeps the number that ``gpumem run`` found."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from pytest_gpumem.script.entry import Script, chain, process_as_it_was
from pytest_gpumem.sizes import MIB, format_size
from pytest_gpumem.values.measurement import Measurement

_TEST = """\
# test_{stem}.py
import pytest

from pytest_gpumem import run_script


@pytest.mark.gpumem({marker})
def test_{stem}():
    run_script({call})
"""


def run_script(name: str, *arguments: str, steps: int = 2, module: bool = False) -> int:
    """Run a script in a test, for as long as ``gpumem run`` does, and return its steps.

    Args:
        name: the script's path, as for ``python``; a module's name where it is one.
        arguments: its command line.
        steps: how many steps of its optimizer it is to do. One that does fewer runs to its end.
        module: whether ``name`` is a module, as with ``python -m``.

    ``sys.argv``, ``sys.path`` and ``__main__`` are the script's while it runs. Exceptions of it, a
    ``SystemExit`` with a code other than 0 too, propagate. Raises ``ValueError`` where there is
    nothing to run.
    """
    from pytest_gpumem.script.stopping import Steps, StopError

    script = Script(name, arguments, module)
    script.check()
    counter = Steps(steps)
    with process_as_it_was(), counter.counted():
        try:
            script.run()
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        except BaseException as error:
            if not any(isinstance(one, StopError) for one in chain(error)):
                raise
    return counter.count


def kept_test(script: Script, gpu: str, measured: Measurement, steps: int) -> str:
    """Return the source of a test that keeps the peak of ``script`` on ``gpu``."""
    peak = measured.peak_allocated
    repeats = measured.simulated or measured.dry  # to the byte; else it has the default tolerance
    limit = peak if repeats else math.ceil(peak * 1.01) + MIB
    marker = [f"max={limit:_}", *([f'gpu="{gpu}"'] if repeats else [])]
    call = [
        # JSON, which Python reads as it is meant.
        *(json.dumps(text, ensure_ascii=False) for text in (script.name, *script.arguments)),
        f"steps={steps}",
        *(["module=True"] if script.is_module else []),
    ]
    last = script.name.rpartition(".")[2] if script.is_module else Path(script.name).stem
    return _TEST.format(
        stem=re.sub(r"\W", "_", last) or "script",
        marker=", ".join(marker),
        call=", ".join(call),
    ).replace(")\ndef", f")  # {format_size(limit)}\ndef")
