"""Facts derived from an allocation's frames, computed by hand for stacks as torch records them."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.attribution.frames import UNKNOWN, StackFacts, category, frames_in, stack_facts

Frames = list[dict[str, Any]]


def stack(*frames: tuple[str, str, int]) -> Frames:
    return [{"filename": file, "name": name, "line": line} for file, name, line in frames]


def native(*names: str) -> Frames:
    return stack(*(("??", name, 0) for name in names))


CALL = stack(
    ("/app/model.py", "forward", 7), ("/site/torch/nn/modules/module.py", "_call_impl", 1750)
)
TRAIN = stack(("/app/train.py", "main", 30))


def test_the_line_is_the_user_s_with_its_path_as_shown() -> None:
    frames = stack(("/site/torch/nn/functional.py", "softmax", 2100)) + CALL + TRAIN
    assert stack_facts(frames, {"/app/model.py": "model.py"}) == StackFacts(
        site="model.py:7",
        function="forward",
        operator="functional.softmax",
        during="forward",
        stack=(
            "/site/torch/nn/functional.py:2100 softmax",
            "model.py:7 forward",
            "/site/torch/nn/modules/module.py:1750 _call_impl",
            "/app/train.py:30 main",
        ),
    )


@pytest.mark.parametrize(
    ("symbols", "operator"),
    [
        (("at::_ops::empty_memory_format::call()", "at::_ops::mm::redispatch()"), "aten::mm"),
        (("at::_ops::mul_Tensor::call(at::Tensor const&)",), "aten::mul"),
        (("at::_ops::sum_dim_IntList::call()",), "aten::sum"),
        (("at::_ops::resize_::call()", "at::_ops::arange_start_out::call()"), "aten::arange"),
        (("at::_ops::_to_copy::call()",), "Tensor.to"),
        (("at::_ops::empty_memory_format::call()",), "aten::empty"),
    ],
)
def test_the_operator_is_the_innermost_that_is_no_allocation(
    symbols: tuple[str, ...], operator: str
) -> None:
    assert stack_facts(native(*symbols) + TRAIN, {}).operator == operator


def test_backward_runs_on_a_thread_without_python() -> None:
    frames = native("at::_ops::mm::call()", "torch::autograd::generated::MmBackward0::apply(int)")
    assert stack_facts(frames, {}) == StackFacts(operator="MmBackward0", during="backward")


@pytest.mark.parametrize(
    ("file", "function", "during"),
    [
        ("torch/optim/adamw.py", "_multi_tensor_adamw", "step"),
        ("torch/optim/optimizer.py", "zero_grad", ""),
        ("torch/autograd/graph.py", "_engine_run_backward", "backward"),
        ("torch/nn/modules/module.py", "convert", "making"),
        ("/env/site-packages/torch/nn/modules/module.py", "_call_impl", "forward"),
        ("/app/optim/torch_like.py", "step", ""),
    ],
)
def test_the_phase_follows_from_torch_functions(file: str, function: str, during: str) -> None:
    assert stack_facts(stack((file, function, 1)) + TRAIN, {}).during == during


@pytest.mark.parametrize(
    ("of", "kept", "holds"),
    [
        (StackFacts(during="forward"), True, "activations"),
        (StackFacts(during="forward"), False, "temporaries"),
        (StackFacts(during="backward"), True, "gradients"),
        (StackFacts(during="step"), True, "optimizer state"),
        (StackFacts(during="step"), False, "temporaries"),
        (StackFacts(during="making"), True, "parameters"),
        (StackFacts(during="step", library=True), True, "workspace"),
        (StackFacts(operator="Tensor.to"), True, "inputs"),
        (StackFacts(operator="aten::mm"), False, "other"),
        (UNKNOWN, True, "other"),
    ],
)
def test_the_category_follows_from_the_stack(of: StackFacts, kept: bool, holds: str) -> None:
    assert category(of, kept=kept) == holds


@pytest.mark.parametrize(
    "function",
    [
        # As the history of torch's CUDA builds names them.
        "at::cuda::getNewWorkspace()",  # 2.6
        "at::cuda::setWorkspaceForHandle(cublasContext*, c10::cuda::CUDAStream)",  # 2.10, 2.13
        "at::cuda::allocateCUDABlasWorkspace(unsigned long)",  # 2.15
        "at::cuda::getCUDABlasLtWorkspace()",
    ],
)
def test_cublas_is_recognised_by_the_function_for_its_workspace(function: str) -> None:
    assert stack_facts(native(function, "at::_ops::mm::call()"), {}).library


ALLOCATING = ("torch::unwind::unwind()", "??", "c10::cuda::CUDACachingAllocator::allocate()")


@pytest.mark.parametrize(
    ("functions", "library"),
    [
        # As the history of torch's CUDA builds names them: of 2.6, 2.15, and of a tensor in 2.15.
        (("at::native::run_conv_plan(cudnnContext*)", "at::native::try_configs()"), True),
        (("at::native::cudnn_convolution(at::Tensor const&)", "at::_ops::mm::call()"), True),
        (("at::native::convolution_backward(at::Tensor const&)",), True),
        (("at::detail::empty_cuda()", "at::native::cudnn_convolution()"), False),
    ],
)
def test_cudnn_s_workspace_is_requested_by_the_convolution(
    functions: tuple[str, ...], library: bool
) -> None:
    assert stack_facts(native(*ALLOCATING, *functions), {}).library is library


def test_malformed_frames_are_left_out() -> None:
    odd: list[Any] = [7, {"filename": 3, "name": "f"}, {"filename": "a.py"}]
    assert frames_in({"frames": [*odd, *TRAIN]}) == TRAIN
    assert frames_in({"frames": "text"}) == frames_in({}) == []
