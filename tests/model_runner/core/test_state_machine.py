"""Both kinds of admission, driven through every crossing of messages (two_processes.py)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.model_runner.core.two_processes import TwoProcesses

_SETTINGS = settings(
    max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


class TwoProcessesPredictive(TwoProcesses):
    """The door only foresees; the engine grants, holds and preempts."""

    predictive = True


TestTwoProcesses = TwoProcesses.TestCase
TestTwoProcesses.settings = _SETTINGS
TestTwoProcessesPredictive = TwoProcessesPredictive.TestCase
TestTwoProcessesPredictive.settings = _SETTINGS
