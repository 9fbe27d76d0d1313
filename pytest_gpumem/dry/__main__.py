"""Runs a Python program on the dry device; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from pytest_gpumem.dry.gpus import DEFAULT
from pytest_gpumem.dry.load import environment
from pytest_gpumem.dry.torch_build import DryError
from pytest_gpumem.simulated.gpu.catalogue import GpuError


def main() -> int:
    """Start the program in place of this one; return 2 where the device cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m pytest_gpumem.dry", description=__doc__)
    parser.add_argument("--gpu", default=DEFAULT, metavar="MODEL[*N],...")
    parser.add_argument("--print-environment", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="SCRIPT, -m MODULE or -c CODE")
    options = parser.parse_args()
    try:
        variables = environment(options.gpu)
    except (DryError, GpuError) as error:
        print(f"gpumem: {error}", file=sys.stderr)
        return 2
    if options.print_environment:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    if not options.program:
        parser.error("no program is named: write a script, -m MODULE or -c CODE")
    os.execve(sys.executable, [sys.executable, *options.program], {**os.environ, **variables})


if __name__ == "__main__":
    sys.exit(main())
