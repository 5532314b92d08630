"""What a step costs, as a formula: the stand-in for a model and a device in a replay."""

from __future__ import annotations

from dataclasses import dataclass

from model_runner.core.output import RunnerOutput, SchedulerOutput

_END, _TOKEN = 0, 1


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a step: base + per_token · tokens computed + per_context_token · tokens of context read.

    The weights are read once a step, whatever is in it (base); each token costs its arithmetic; and each
    sequence reads its own cache.
    """

    base: float
    per_token: float
    per_context_token: float

    def seconds(self, tokens: int, context_tokens: int) -> float:
        return self.base + self.per_token * tokens + self.per_context_token * context_tokens


class SimulatedRunner:
    """Draws nothing: a sequence ends where the trace says it did. Each request's length is its seed."""

    end_token_id = _END

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self.step_seconds = 0.0  # of the step that was executed last

    def execute(self, scheduled: SchedulerOutput) -> RunnerOutput:
        self.step_seconds = self._model.seconds(scheduled.num_tokens, scheduled.context_tokens)
        tokens = [
            _END if sample.position + 1 >= sample.params.seed else _TOKEN for sample in scheduled.samples
        ]
        return RunnerOutput(tokens, [None] * len(tokens))


def standard() -> StepModel:
    """An 8B model on a data-centre GPU: 16 GB of weights a step, 128 KiB of cache per token of context."""
    return StepModel(base=0.006, per_token=3.2e-5, per_context_token=4.0e-8)
