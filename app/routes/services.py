"""What the routes work with."""

from __future__ import annotations

from dataclasses import dataclass

from app.metrics import Metrics
from app.preparation import Preparation
from app.settings import Settings
from app.tenancy import Tenancy
from app.validation import Limits
from model_runner.async_engine import AsyncEngine
from model_runner.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Services:
    engine: AsyncEngine
    tokenizer: Tokenizer
    settings: Settings
    metrics: Metrics
    preparation: Preparation
    tenancy: Tenancy

    @property
    def limits(self) -> Limits:
        model = self.engine.model
        return Limits(
            served_model_name=self.settings.served_model_name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            default_max_tokens=self.settings.default_max_tokens,
            max_prompts=self.settings.max_prompts,
        )
