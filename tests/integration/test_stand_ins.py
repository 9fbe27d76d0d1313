"""Libraries that need CUDA to be installed, in marked tests on a simulated GPU."""

from __future__ import annotations

import pytest

import pytest_gpumem.simulated.stand_ins.flash_attn  # noqa: F401  # pytester forgets imports
from tests.pytest_project import Project

SENTENCE = "flash-attn is not installed: a stand-in allocated what flash-attn 2.8.3 does"

ATTENTION = """
    import importlib.util

    def is_there():
        return importlib.util.find_spec("flash_attn") is not None

    assert not is_there()

    @pytest.mark.gpumem(max="1MiB", gpu="A100-40GB")
    def test_attention():
        from flash_attn import flash_attn_func

        q = torch.zeros(1, 64, 2, 64, device="cuda", dtype=torch.half)
        assert flash_attn_func(q, q, q).shape == q.shape

    def test_unmarked():
        assert not is_there()
"""


def test_a_marked_test_imports_a_library_that_is_not_installed(project: Project) -> None:
    project.write(test_attention=ATTENTION)

    test = project.report()["test_attention.py::test_attention"]

    assert test["outcome"] == "passed"
    assert test["measurement"]["notes"] == [SENTENCE]


def test_stand_ins_can_be_switched_off(project: Project) -> None:
    project.write(test_attention=ATTENTION)

    result = project.run("--gpumem-sim-stand-ins=off")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "gpumem: simulated T4 without stand-ins;*",
            "*ModuleNotFoundError: No module named 'flash_attn'",
        ]
    )


def test_a_name_of_a_library_is_refused_in_one_sentence(project: Project) -> None:
    result = project.run("--gpumem-sim-stand-ins=flash-attn")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --gpumem-sim-stand-ins='flash-attn' is not accepted; write auto or off*"]
    )


def test_models_of_transformers_train_with_flash_attention(project: Project) -> None:
    pytest.importorskip("transformers")
    project.write(
        test_llama="""
            from transformers import LlamaConfig, LlamaForCausalLM

            def made():
                config = LlamaConfig(
                    vocab_size=1000,
                    hidden_size=256,
                    intermediate_size=512,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    attn_implementation="flash_attention_2",
                    dtype=torch.bfloat16,
                )
                return LlamaForCausalLM(config).to("cuda", torch.bfloat16)

            @pytest.mark.gpumem(max="64MiB", gpu="A100-40GB")
            def test_training():
                model = made()
                words = torch.randint(0, 1000, (2, 128), device="cuda")
                model(input_ids=words, labels=words).loss.backward()
                assert all(each.grad is not None for each in model.parameters())

            @pytest.mark.gpumem(max="64MiB", gpu="A100-40GB")
            def test_padded_words_and_the_loss_itself():
                model = made()
                words = torch.randint(0, 1000, (2, 128), device="cuda")
                mask = torch.ones_like(words)
                mask[0, :28] = 0
                loss = model(input_ids=words, labels=words, attention_mask=mask).loss
                loss.backward()
                assert 5 < loss.item() < 9  # words at random: log(1000) is 6.9

            def test_outside():
                with pytest.raises(ImportError):
                    made()
        """
    )

    result = project.run_apart(f"--gpumem-report=json:{project.path / 'report.json'}")

    result.assert_outcomes(passed=3)
    tests = project.written_report()
    assert len(tests) == 2
    for test in tests.values():
        assert SENTENCE in test["measurement"]["notes"]
