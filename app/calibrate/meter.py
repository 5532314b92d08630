"""What a server's metrics say of its steps."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from model_runner.errors import StartupError
from model_runner.replay.fit import Measured

_STEPS = "plimsoll_step_duration_seconds"
_COUNTERS = (
    f"{_STEPS}_count",
    "plimsoll_step_tokens_total",
    "plimsoll_context_tokens_total",
    f"{_STEPS}_sum",
)
_LEVELS = (
    "plimsoll_kv_cache_budget_bytes",
    "plimsoll_kv_cache_bytes_per_token",
    "plimsoll_requests_running",
    "plimsoll_requests_waiting",
)


@dataclass(frozen=True, slots=True)
class Served:
    """What is being measured."""

    model: str
    about: str
    max_model_len: int
    budget_tokens: int
    kv_bytes_per_token: int


class Meter:
    """Reads one server's page. Every method raises StartupError, with the reason, where there is none."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = f"{base_url}/metrics"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def served(self) -> Served:
        """Raises StartupError where others have requests there, too."""
        page, labels = await self._read()
        if page["plimsoll_requests_running"] or page["plimsoll_requests_waiting"]:
            raise StartupError("The server has other requests; calibrate needs it for itself alone.")
        each = int(page["plimsoll_kv_cache_bytes_per_token"])
        return Served(
            model=labels["model"],
            about=f"measured: {labels['model']} in {labels['dtype']} on {labels['device']}",
            max_model_len=int(labels["max_model_len"]),
            budget_tokens=int(page["plimsoll_kv_cache_budget_bytes"]) // each,
            kv_bytes_per_token=each,
        )

    async def total(self) -> Measured:
        """Of all steps since the server started."""
        page, _ = await self._read()
        steps, tokens, context_tokens, seconds = (page[name] for name in _COUNTERS)
        return Measured(int(steps), int(tokens), int(context_tokens), seconds)

    async def _read(self) -> tuple[dict[str, float], dict[str, str]]:
        """(samples without labels, the labels of what is served)."""
        try:
            async with httpx.AsyncClient(timeout=30) as client:
                answer = await client.get(self._url, headers=self._headers)
                answer.raise_for_status()
            families = list(text_string_to_metric_families(answer.text))
        except httpx.HTTPError as error:
            message = f"no answer from {self._url}: {error}. Is the server up? --base-url says where."
            raise StartupError(message) from None
        except ValueError:
            raise StartupError(f"{self._url} is no page of metrics.") from None
        samples = [sample for family in families for sample in family.samples]
        page = {sample.name: sample.value for sample in samples if not sample.labels}
        labels = next((each.labels for each in samples if each.name == "plimsoll_model_info"), None)
        if labels is None or any(name not in page for name in (*_COUNTERS, *_LEVELS)):
            raise StartupError(f"{self._url} doesn't tell of steps: it is no Plimsoll, or an older one.")
        return page, labels


def since(before: Measured, now: Measured) -> Measured:
    return Measured(
        now.steps - before.steps,
        now.tokens - before.tokens,
        now.context_tokens - before.context_tokens,
        now.seconds - before.seconds,
    )
