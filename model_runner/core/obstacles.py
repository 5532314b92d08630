"""Why each of those that wait does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from model_runner.core.fair_queue import Waiting
from model_runner.core.ledger import Ask


class Obstacle(StrEnum):
    """Why a request waits."""

    ENGINE = "engine_restarting"  # there is none to run it
    OTHERS = "behind_others"  # whose turn comes first
    PLACES = "no_place_in_batch"
    ROOM = "no_room_in_cache"  # as the policy sees it
    NONE = "next"  # it comes in with the engine's next word


@dataclass(frozen=True, slots=True)
class InTurn:
    """How a waiting request stands."""

    waiting: Waiting[Ask]
    obstacle: Obstacle
    expected_in_seconds: float
