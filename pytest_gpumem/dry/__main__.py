"""Runs a Python program on the dry device; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from pytest_gpumem.dry.build import DryError
from pytest_gpumem.dry.load import DEFAULT, environment
from pytest_gpumem.simulated.gpu.catalogue import GpuError


def main() -> int:
    """Replace this process by the program.

    Returns 2 if the device is not available, 0 after printing the environment.
    """
    parser = argparse.ArgumentParser(prog="python -m pytest_gpumem.dry", description=__doc__)
    parser.add_argument("--gpu", default=DEFAULT, metavar="MODEL[*N],...")
    parser.add_argument("--print-environment", action="store_true")
    parser.usage = f"{parser.format_usage().split(': ', 1)[1].strip()} SCRIPT | -m MODULE | -c CODE"
    own, program = _split(sys.argv[1:])
    options = parser.parse_args(own)
    try:
        variables = environment(options.gpu)
    except (DryError, GpuError) as error:
        print(f"gpumem: {error}", file=sys.stderr)
        return 2
    if options.print_environment:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    if not program:
        parser.error("no program is named: write a script, -m MODULE or -c CODE")
    return os.execve(sys.executable, [sys.executable, *program], {**os.environ, **variables})


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the options of this command, and the program with its arguments."""
    at = 0
    while at < len(arguments) and arguments[at].startswith(("--", "-h")):
        at += 2 if arguments[at] == "--gpu" else 1
    return arguments[:at], arguments[at:]


if __name__ == "__main__":
    sys.exit(main())
