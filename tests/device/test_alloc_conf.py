"""Which environment variable the CUDA allocator reads, by release."""

from __future__ import annotations

import pytest

from pytest_gpumem.values.environment import alloc_conf_of_process

CUDA, HIP, ANY = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("version", "variables", "expected"),
    [
        ((2, 9), {}, ""),
        ((2, 9), {CUDA: "cuda", ANY: "any"}, "cuda"),
        ((2, 9), {ANY: "any"}, ""),
        ((2, 10), {ANY: "any"}, "any"),
        ((2, 10), {HIP: "hip", ANY: "any"}, "hip"),
        ((2, 15), {CUDA: "cuda", HIP: "hip", ANY: "any"}, "cuda"),
    ],
)
def test_the_first_variable_that_is_set_is_read(
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
    variables: dict[str, str],
    expected: str,
) -> None:
    for name in (CUDA, HIP, ANY):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert alloc_conf_of_process(version) == expected
