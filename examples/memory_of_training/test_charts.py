"""The charts and their data can be generated."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.memory_of_training.charts import CHARTS, main

TABLES = {
    "blocks_of_512_bytes",
    "bytes_per_element",
    "one_step_with_adam",
    "training_with_adam",
    "training_with_sgd",
}


def test_tables_need_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.memory_of_training.charts.find_spec", lambda name: None)
    main([str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.csv" for name in TABLES}
    with (tmp_path / "training_with_adam.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["predicted"] for row in rows] == [row["measured"] for row in rows]
    assert rows[-1] == {
        "event": "optim_step_4",
        "trainable_params": "257024",
        "input": "102400",
        "output": "0",
        "gradient": "257024",
        "intermediate_tensors": "0",
        "optimizer_state": "514048",
        "predicted": "1130496",
        "measured": "1130496",
    }


@pytest.mark.skipif(
    find_spec("matplotlib") is None,
    reason="charts need matplotlib: pip install 'pytest-gpumem[examples]'",
)
def test_every_chart_is_drawn(tmp_path: Path) -> None:
    main([str(tmp_path)])
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn == {chart.__name__ for chart in CHARTS}


def test_a_gpu_that_is_not_there_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--cuda"])
    assert "torch sees no CUDA device" in capsys.readouterr().err
