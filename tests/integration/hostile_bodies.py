"""Test bodies that damage the state of their process, by name, each with its required outcome.

Used by ``test_hostile_bodies.py``, which runs each before a test with a known number.
"""

from __future__ import annotations

PASSED, FAILED = "passed", "failed"
UNMEASURED = "failed, unmeasured"
"""torch refuses to wait for the device during a capture, so that nothing can be measured."""

IMPORTS = """
    import builtins, gc, io, os, random, signal, sys, threading, time, warnings
"""

BODIES: dict[str, tuple[str, str]] = {
    "exits": (FAILED, "sys.exit(3)"),
    "raises_a_base_exception": (FAILED, "raise type('Odd', (BaseException,), {})('odd')"),
    "raises_what_cannot_be_shown": (
        FAILED,
        "raise type('Mute', (Exception,), {'__str__': None, '__repr__': None})()",
    ),
    "raises_a_huge_message": (FAILED, "raise ValueError('x' * 3_000_000)"),
    "raises_a_generator_exit": (FAILED, "raise GeneratorExit"),
    "replaces_stdout": (PASSED, "sys.stdout = sys.stderr = None"),
    "closes_descriptors": (PASSED, "os.close(os.dup(1))"),
    "stays_in_a_deleted_folder": (
        PASSED,
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
    ),
    "forgets_modules": (
        PASSED,
        "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith(('json', "
        "'pytest_gpumem.report', 'pytest_gpumem.attribution'))]",
    ),
    "puts_nonsense_among_modules": (
        FAILED,
        "sys.modules['pytest_gpumem.odd'] = None; sys.modules[3] = 4; assert False",
    ),
    "empties_sys_path": (PASSED, "sys.path.clear()"),
    "lowers_the_recursion_limit": (PASSED, "sys.setrecursionlimit(300)"),
    "recurses_without_end": (FAILED, "(lambda f: f(f))(lambda f: f(f))"),
    "turns_the_collector_off": (PASSED, "gc.disable(); gc.set_threshold(0)"),
    "freezes_the_heap": (PASSED, "gc.freeze()"),
    "replaces_the_collector": (
        PASSED,
        "gc.get_threshold = gc.get_objects = gc.freeze = lambda *_: 1 / 0",
    ),
    "replaces_builtins": (PASSED, "builtins.print = builtins.input = lambda *_, **__: 1 / 0"),
    "replaces_functions_of_torch_cuda": (
        PASSED,
        "torch.cuda.memory_allocated = torch.cuda.synchronize = lambda *_: 1 / 0",
    ),
    "replaces_the_statistics": (
        PASSED,
        "torch.cuda.memory_stats = torch.cuda.memory_snapshot = torch.cuda.empty_cache = "
        "lambda *_, **__: 1 / 0",
    ),
    "replaces_the_module_call": (
        PASSED,
        "torch.nn.Module.__call__ = lambda *_: 1 / 0",
    ),
    "stays_in_autocast": (PASSED, "torch.autocast('cuda').__enter__()"),
    "stays_without_gradients": (PASSED, "torch.set_grad_enabled(False)"),
    "stays_in_no_grad": (PASSED, "torch.no_grad().__enter__()"),
    "changes_the_default_dtype": (PASSED, "torch.set_default_dtype(torch.float64)"),
    "changes_the_default_device": (PASSED, "torch.set_default_device('cuda')"),
    "stays_on_a_stream": (PASSED, "torch.cuda.stream(torch.cuda.Stream()).__enter__()"),
    "stays_in_a_capture": (PASSED, "torch.cuda.graph(torch.cuda.CUDAGraph()).__enter__()"),
    "keeps_a_graph": (PASSED, "KEPT.append(torch.cuda.CUDAGraph())"),
    "stays_in_a_phase": (PASSED, "gpumem.phase('left').__enter__()"),
    "leaves_a_generator_in_a_phase": (
        PASSED,
        "KEPT.append((0 for _ in [0] if gpumem.phase('left').__enter__() is None)); next(KEPT[-1])",
    ),
    "exhausts_the_device": (FAILED, "KEPT.append(torch.empty(1 << 50, device='cuda'))"),
    "fills_the_device": (
        FAILED,
        "while True: KEPT.append(torch.empty(1 << 30, dtype=torch.uint8, device='cuda'))",
    ),
    "changes_the_memory_fraction": (PASSED, "torch.cuda.set_per_process_memory_fraction(0.00001)"),
    "resets_the_statistics": (
        PASSED,
        "torch.cuda.reset_peak_memory_stats(); torch.cuda.empty_cache()",
    ),
    "makes_warnings_errors": (PASSED, "warnings.simplefilter('error')"),
    "starts_a_thread": (
        PASSED,
        "threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()",
    ),
    "fails_in_a_thread": (PASSED, "t = threading.Thread(target=int, args=('x',)); t.start()"),
    "forks": (
        PASSED,
        "child = os.fork(); child or os._exit(0); os.waitpid(child, 0)",
    ),
    "ignores_signals": (PASSED, "signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
    "freezes_time": (PASSED, "time.time = time.perf_counter = time.monotonic = lambda: 0.0"),
    "changes_the_environment": (
        PASSED,
        "os.environ.update(PYTORCH_CUDA_ALLOC_CONF='odd', CUBLAS_WORKSPACE_CONFIG='odd')",
    ),
    "empties_the_environment": (PASSED, "os.environ.clear()"),
    "adds_odd_properties": (
        PASSED,
        "request.node.user_properties.append(('odd', float('nan')))",
    ),
    "seeds": (PASSED, "random.seed(0); torch.manual_seed(0); torch.cuda.manual_seed_all(0)"),
    "keeps_its_exception": (
        FAILED,
        "KEPT.append(torch.empty(1 << 20, device='cuda')); raise KeyError(KEPT)",
    ),
}
"""Name of a body -> its outcome and its code; it has allocated 1 MiB before."""


def project_source() -> str:
    """Return a test module in which every body is followed by a test of a known number."""
    parts = [IMPORTS, "    KEPT = []\n"]
    for name, (_, code) in BODIES.items():
        parts.append(f"""
    @pytest.mark.gpumem
    def test_{name}(gpumem, request):
        held = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        {code}

    @pytest.mark.gpumem
    def test_after_{name}():
        x = torch.ones(1024, device="cuda", requires_grad=True)
        y = (x * 2).sum()
        assert y.requires_grad and torch.ones(1).device.type == "cpu"
""")
    return "".join(parts)
