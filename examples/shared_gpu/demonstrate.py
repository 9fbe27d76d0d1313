"""200 tests on one simulated GPU, by one worker and by four: ``python demonstrate.py``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = 200


def main() -> int:
    """Run the tests twice; print what pytest says of the GPU they shared."""
    here = Path(__file__).parent
    code = 0
    for workers in (1, 4):
        with tempfile.TemporaryDirectory() as folder:
            found = subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", str(here / "test_many.py"), "-q"),
                    *("--gpumem-device=sim", "--gpumem-share", f"-n{workers}", "-p", "no:randomly"),
                ],
                env={**os.environ, "SHARED_GPU_TESTS": str(TESTS), "GPUMEM_SHARE_DIR": folder},
                capture_output=True,
                text=True,
                check=False,
            )
        shown = [
            line for line in found.stdout.splitlines() if line.startswith(("note: ", "  that"))
        ]
        print(f"{workers} worker{'s' * (workers > 1)}", *shown, sep="\n  ")
        print(f"  {found.stdout.splitlines()[-1]}")
        code = code or found.returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
