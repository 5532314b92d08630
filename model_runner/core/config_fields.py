"""A configuration's fields, read with the names that say what went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from model_runner.errors import ModelNotPriced

# Where multimodal configurations keep their language model's.
_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")


class ConfigFields:
    """A decoder's fields; the language model's, where they are nested. Layers may override them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        while nested := next(
            (config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), None
        ):
            config = nested
        self._config = config
        self.model_type = str(config.get("model_type", "unknown"))
        overrides = config.get("per_layer_config") or {}
        self._overrides = {int(layer): fields for layer, fields in overrides.items()}

    def get(self, name: str, layer: int | None = None) -> Any:
        """The field's value, for one layer where it differs; None where there is none."""
        if layer in self._overrides and name in self._overrides[layer]:
            return self._overrides[layer][name]
        return self._config.get(name)

    def has(self, *names: str) -> bool:
        return all(self._config.get(name) is not None for name in names)

    def count(self, name: str, layer: int | None = None) -> int:
        """A field that must be one positive number."""
        value = self.get(name, layer)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(name, f"it is {value!r}, not one positive number")
        return value

    def first_count(self, *names: str, layer: int | None = None) -> int:
        """The first of these fields that is set."""
        name = next((name for name in names if self.get(name, layer) is not None), names[0])
        return self.count(name, layer)

    def refuse(self, field: str, why: str) -> NoReturn:
        raise ModelNotPriced(
            f"The KV cache of model type {self.model_type!r} can't be priced by its {field}: {why}."
        )
