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


def test_a_marked_test_imports_what_is_not_installed(project: Project) -> None:
    project.write(test_attention=ATTENTION)

    test = project.report()["test_attention.py::test_attention"]

    assert test["outcome"] == "passed"
    assert test["measurement"]["notes"] == [SENTENCE]


@pytest.mark.parametrize("option", ["off", "flash-attn"])
def test_the_header_names_what_was_chosen(project: Project, option: str) -> None:
    project.write(test_attention=ATTENTION)

    result = project.run(f"--gpumem-sim-stand-ins={option}")

    if option == "off":
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(
            [
                "gpumem: simulated T4 with stand-ins of no library;*",
                "*ModuleNotFoundError: No module named 'flash_attn'",
            ]
        )
    else:
        result.assert_outcomes(passed=2)
        result.stdout.fnmatch_lines(["gpumem: simulated T4 with stand-ins of flash-attn;*"])


def test_an_unknown_library_is_refused_in_one_sentence(project: Project) -> None:
    result = project.run("--gpumem-sim-stand-ins=numpy")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --gpumem-sim-stand-ins='numpy': no library called*"])


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


def test_models_of_transformers_train_with_flash_attention_3_where_it_is_named(
    project: Project,
) -> None:
    pytest.importorskip("transformers")
    project.write(
        test_llama="""
            from transformers import LlamaConfig, LlamaForCausalLM

            @pytest.mark.gpumem(max="128MiB", gpu="H100")
            def test_training():
                config = LlamaConfig(
                    vocab_size=1000,
                    hidden_size=256,
                    intermediate_size=512,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    attn_implementation="flash_attention_3",
                    dtype=torch.bfloat16,
                )
                model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
                words = torch.randint(0, 1000, (2, 128), device="cuda")
                model(input_ids=words, labels=words).loss.backward()
                assert all(each.grad is not None for each in model.parameters())
        """
    )

    result = project.run_apart(
        "--gpumem-sim-stand-ins=flash-attn-3",
        f"--gpumem-report=json:{project.path / 'report.json'}",
    )

    result.assert_outcomes(passed=1)
    (test,) = project.written_report().values()
    assert (
        "flash-attn-3 is not installed: a stand-in allocated what flash-attn-3 3.0.0 does"
        in test["measurement"]["notes"]
    )


def test_a_step_with_apex_and_xformers_where_they_are_named(project: Project) -> None:
    project.write(
        test_step="""
            @pytest.mark.gpumem(max="64MiB", gpu="A100-40GB")
            def test_step():
                import xformers.ops as xops
                from apex.normalization import FusedRMSNorm
                from apex.optimizers import FusedAdam

                norm = FusedRMSNorm(64).cuda().half()
                optimizer = FusedAdam(norm.parameters())
                x = torch.randn(2, 128, 4, 64, device="cuda", dtype=torch.half)
                rows = norm(x)
                mask = xops.LowerTriangularMask()
                xops.memory_efficient_attention(rows, rows, rows, mask).sum().backward()
                optimizer.step()
        """
    )

    result = project.run("--gpumem-sim-stand-ins=apex,xformers")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["gpumem: simulated T4 with stand-ins of apex, xformers;*"])


def test_a_step_in_fp8_with_transformer_engine_where_it_is_named(project: Project) -> None:
    project.write(
        test_step="""
            @pytest.mark.gpumem(max="64MiB", gpu="H100")
            def test_step():
                import transformer_engine.pytorch as te
                from transformer_engine.common import recipe

                layer = te.LayerNormLinear(64, 128, params_dtype=torch.bfloat16)
                x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
                with te.fp8_autocast(fp8_recipe=recipe.DelayedScaling(amax_history_len=16)):
                    out = layer(x)
                out.sum().backward()

            @pytest.mark.gpumem(gpu="H100")
            def test_experts():
                import transformer_engine.pytorch as te

                te.GroupedLinear(2, 8, 64)
        """
    )

    result = project.run("--gpumem-sim-stand-ins=transformer-engine")

    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "gpumem: simulated T4 with stand-ins of transformer-engine;*",
            "*transformer_engine.pytorch.GroupedLinear at *test_step.py* has no stand-in*",
        ]
    )
