"""Runs every sample of PyTorch's operator database on the dry device, each operator in a fork.

    python -m pytest_gpumem.dry benchmarks/dry_operators.py [NAME ...] [--module-db]

Prints the operators whose process died, with the signal, and the errors that samples raised,
folded by their text. Nothing may die: a library that answers nonsense would end a user's pytest.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

_PATIENCE = 120
"""Seconds for the samples of one operator."""


def main() -> int:
    """Run the operators; return 1 where a process died."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--verbose", action="store_true", help="print where samples raise")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    # The operator database initialises CUDA when it is imported; the dry runtime survives a fork.
    torch.cuda._is_in_bad_fork = lambda: False
    operators = [op for op in op_db if not options.names or op.name in options.names]
    ran, died, errors = 0, [], Counter[str]()
    start = time.time()
    for op in operators:
        passed, raised, ending = in_fork(op, verbose=options.verbose)
        ran += passed
        if ending:
            died.append(f"{op.formatted_name}: {ending}")
        errors.update({f"{op.formatted_name}: {text}": count for text, count in raised.items()})
    print(f"{len(operators)} operators, {ran} samples ran in {time.time() - start:.0f} s")
    print(f"{len(errors)} errors, of {sum(errors.values())} samples")
    for text, count in sorted(errors.items()):
        print(f"  {count:4} {text}")
    print(f"{len(died)} processes died")
    for line in died:
        print(f"  {line}")
    return 1 if died else 0


def in_fork(op: Any, *, verbose: bool) -> tuple[int, Counter[str], str]:
    """Return how many samples of ``op`` ran, what others raised, and how the process died."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(_PATIENCE)
        with os.fdopen(write, "wb", buffering=0) as pipe:
            run(op, pipe, verbose)
        os._exit(0)  # without what the parent would do at its end
    os.close(write)
    passed, raised = 0, Counter[str]()
    last = ""
    with os.fdopen(read, "rb") as pipe:
        while True:
            try:
                kind, text = pickle.load(pipe)
            except EOFError:
                break
            passed += kind == "passed"
            last = text if kind == "begun" else last
            if kind == "raised":
                raised[text] += 1
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return passed, raised, f"{signal.Signals(os.WTERMSIG(status)).name} at {last}"
    return passed, raised, "" if status == 0 else f"exit code {os.WEXITSTATUS(status)} at {last}"


def run(op: Any, pipe: Any, verbose: bool) -> None:
    """Run the samples of ``op``, forward and backward."""
    try:
        samples = list(op.sample_inputs("cuda", torch.float32, requires_grad=op.supports_autograd))
    except BaseException as error:
        dump(pipe, "raised", f"samples: {described(error)}")
        return
    for index, sample in enumerate(samples):
        dump(pipe, "begun", f"sample {index}")
        try:
            backward(op(sample.input, *sample.args, **sample.kwargs))
            dump(pipe, "passed", "")
        except BaseException as error:
            if verbose:
                traceback.print_exc()
            dump(pipe, "raised", described(error))
    gc.collect()
    torch.cuda.synchronize()


def backward(result: Any) -> None:
    """Run the gradients of whatever a sample returns."""
    found = [
        one
        for one in torch.utils._pytree.tree_leaves(result)
        if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    if found:
        torch.autograd.backward(found, [torch.ones_like(one) for one in found])


def described(error: BaseException) -> str:
    """Return the first line of what ``error`` says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def dump(pipe: Any, kind: str, text: str) -> None:
    """Send one line to the parent, at once: the process may die next."""
    pipe.write(pickle.dumps((kind, text)))


if __name__ == "__main__":
    sys.exit(main())
