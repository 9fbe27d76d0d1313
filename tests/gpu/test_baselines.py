"""Baselines and predictions: recorded, compared, regressed."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import CudaProject

TEST = """
    from torch import nn

    def prepared(x):
        return x

    @pytest.mark.gpumem(baseline=True)
    def test_forward():
        model = nn.Linear(1024, 1024).cuda()
        x = torch.ones(4096, 1024, device="cuda")
        model(prepared(x)).sum().backward()
"""

REGRESSED = TEST.replace("return x\n", "return x.double().float()\n")


@pytest.fixture
def _validator() -> None:
    pytest.importorskip("jsonschema", reason="baselines are validated by jsonschema")


@pytest.mark.usefixtures("_validator")
def test_a_regression_against_a_recorded_baseline_fails(cuda: CudaProject) -> None:
    cuda.write(test_model=TEST)
    cuda.run("--gpumem-update-baselines").assert_outcomes(passed=1)
    (folder,) = {path.partition("/")[0] for path in cuda.baselines()}
    assert folder.startswith("cuda-")

    cuda.run().assert_outcomes(passed=1)
    cuda.write(test_model=REGRESSED)
    record = cuda.records()["test_forward"]

    assert record["outcome"] == "failed"
    (verdict, *_) = [v for v in record["verdicts"] if not v["passed"]]
    assert verdict["kind"] == "baseline"
    # At the product, where the peak is, x.double() is freed and its float32 copy is live.
    assert verdict["actual"] - verdict["reference"] >= 4096 * 1024 * 4


@pytest.mark.usefixtures("_validator")
def test_the_explanation_names_the_line_of_a_regression(cuda: CudaProject) -> None:
    cuda.write(test_model=TEST)
    cuda.run("--gpumem-update-baselines", "--gpumem-explain=always").assert_outcomes(passed=1)
    cuda.write(test_model=REGRESSED)

    record = cuda.records()["test_forward"]

    (verdict, *_) = [v for v in record["verdicts"] if not v["passed"]]
    first = verdict["explanation"][0]
    source = (cuda.path / "test_model.py").read_text().splitlines()
    path, _, line = first["site"].rpartition(":")
    assert path == "test_model.py"
    assert "x.double().float()" in source[int(line) - 1]
    total = sum(entry["bytes"] for entry in verdict["explanation"])
    assert total == verdict["actual"] - verdict["reference"]


PREDICTED = """
    from torch import nn

    @pytest.mark.gpumem(predict="1%")
    def test_step():
        model = nn.Linear(2048, 2048).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(256, 2048, device="cuda")).sum().backward()
        optimizer.step()
"""


@pytest.mark.usefixtures("forked_python")
def test_the_measured_peak_agrees_with_the_prediction(cuda: CudaProject) -> None:
    cuda.write(test_predicted=PREDICTED)

    record = cuda.records()["test_step"]

    assert record["outcome"] == "passed"
    verdicts = [v for v in record["verdicts"] if v["kind"] == "prediction"]
    assert {None, "forward", "backward", "step"} <= {verdict["phase"] for verdict in verdicts}
    for verdict in verdicts:
        assert verdict["passed"]
        assert verdict["reference"] == pytest.approx(verdict["actual"], rel=0.01)
