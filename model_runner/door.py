"""How the door is to behave, and a door made that way for a model that has been planned."""

from __future__ import annotations

from dataclasses import dataclass

from model_runner.core.admission import MAX_PASSES, AdmissionController
from model_runner.core.lengths import Lengths
from model_runner.core.pace import Pace
from model_runner.core.policy import Predictive, Strict
from model_runner.core.tenants import TenantPolicy, Tenants
from model_runner.messages import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorPolicy:
    """How the door and the supervisor behave. Times are seconds."""

    predictive: bool = False  # else strict
    overflow_risk: float = 0.0025
    max_queue_requests: int = 1000
    max_queue_seconds: float = 60.0
    tenants: tuple[TenantPolicy, ...] = ()
    engine_step_timeout: float = 60.0
    engine_start_timeout: float = 900.0  # of silence while it starts; 0.0 is none
    first_back_off_seconds: float = 0.5
    most_back_off_seconds: float = 30.0


def make_door(model: ModelInfo, policy: DoorPolicy, *, max_num_seqs: int) -> AdmissionController:
    """Its pace is a guess, to be replaced by what an engine measures before it serves."""
    lengths = Lengths(model.max_model_len)
    admission: Strict | Predictive = Strict()
    if policy.predictive:
        admission = Predictive(
            model.layout, lengths, num_blocks=model.num_blocks, overflow_risk=policy.overflow_risk
        )
    return AdmissionController(
        num_blocks=model.num_blocks,
        max_num_seqs=max_num_seqs,
        max_queue_requests=policy.max_queue_requests,
        max_queue_seconds=policy.max_queue_seconds,
        pace=Pace(decode_step_seconds=0.1, prefill_tokens_per_second=1000.0),
        policy=admission,
        lengths=lengths,
        tenants=Tenants(tenant.in_blocks(model.layout.block_bytes) for tenant in policy.tenants),
        max_passes=MAX_PASSES,
    )
