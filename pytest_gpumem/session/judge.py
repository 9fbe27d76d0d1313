"""Judge a test: its record, from expected, stored and measured numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_gpumem.baseline.compare import Judgement, judge, judge_prediction
from pytest_gpumem.baseline.store import BaselineEntry, BaselineStore, split_nodeid
from pytest_gpumem.device.select import SELECTOR
from pytest_gpumem.marker import Expectation
from pytest_gpumem.options import Settings
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.session.run import Prepared
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement
from pytest_gpumem.values.prediction import PredictedTest

CHECKED_ON_A_GPU = "predict= is checked on a GPU; simulated, a prediction is the measurement itself"


class Judge:
    """A comparison of measurements with limits, and with the baselines of the settings."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._store = BaselineStore(settings.baselines)
        self._predicts = SELECTOR in config.stash
        """Whether this process runs tests only to predict their memory."""

    def record(
        self,
        prepared: Prepared,
        measurement: Measurement,
        others: Sequence[Measurement],
        *,
        passed: bool,
        ranks: str = "",
    ) -> TestRecord | None:
        """Return the record of a test, with verdicts where its body ``passed``.

        One of several ranks is first recorded without verdicts, as if it had not passed; ``ranks``
        names the rank of ``measurement``. Returns ``None`` if an unmarked test used no device.
        Raises :class:`BaselineError` where the stored baseline cannot be read.
        """
        expectation, predicted = prepared.expectation, prepared.predicted
        if expectation is None and measurement.peak_allocated <= 0 and not others:
            return None
        if expectation and expectation.predict and measurement.simulated and not self._predicts:
            measurement = replace(measurement, notes=(*measurement.notes, CHECKED_ON_A_GPU))
        environment = prepared.device.environment
        record = TestRecord(
            nodeid=prepared.item.nodeid,
            outcome="passed" if passed else "failed",
            environment=replace(environment, ranks=ranks) if ranks else environment,
            measurement=measurement,
            other_devices=tuple(others),
            expectation=expectation.to_dict() if expectation else {},
            prediction=predicted.to_dict() if predicted else None,
            judged=False,
            nvml=prepared.device.nvml(),
        )
        if expectation is None or not passed:
            return record
        return self._with_verdicts(record, expectation, predicted)

    def _with_verdicts(
        self, record: TestRecord, expectation: Expectation, predicted: PredictedTest | None
    ) -> TestRecord:
        assert record.measurement is not None
        # Baselines that are being replaced are not compared, and the update reports a file that
        # cannot be read.
        baseline = None
        if expectation.baseline is not False and self._settings.update_baselines != "all":
            baseline = self._store.entry(record.environment, *split_nodeid(record.nodeid))
        judgement = self._compared(record, expectation, record.measurement, baseline)
        verdicts = list(judgement.verdicts)
        if predicted is not None and expectation.predict is not None:
            verdicts += judge_prediction(
                record.measurement, predicted, expectation.predict, record.environment.gpu
            )
        for other in record.other_devices:
            elsewhere = replace(expectation, baseline=False)
            verdicts += self._compared(record, elsewhere, other, None).verdicts
        return replace(
            record,
            judged=True,
            baseline=baseline.to_dict() if baseline else None,
            verdicts=tuple(verdicts),
            improvements=judgement.improvements,
            missing_baseline=judgement.missing_baseline,
        )

    def _compared(
        self,
        record: TestRecord,
        expectation: Expectation,
        measurement: Measurement,
        baseline: BaselineEntry | None,
    ) -> Judgement:
        elsewhere: Sequence[tuple[Environment, BaselineEntry]] = ()
        if baseline is None and expectation.baseline is not False:
            module, test_id = split_nodeid(record.nodeid)
            elsewhere = self._store.elsewhere(module, test_id, record.environment)
        # Where only the variable CI turned the option on, it applies to tests with baseline=True.
        name = "gpumem_require_baselines"
        return judge(
            expectation,
            measurement,
            baseline=baseline,
            environment=record.environment,
            require_baseline=bool(self._config.getoption(name, None) or self._config.getini(name)),
            update=self._settings.update_baselines,
            elsewhere=elsewhere,
            used_elsewhere=bool(record.other_devices),
            default_phases=self._settings.defaults.get("phases", {}),
        )
