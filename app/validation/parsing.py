"""From JSON to a wire model, and from pydantic's findings to one sentence about one field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from model_runner.errors import InvalidRequest

_SHOWN_CHARACTERS = 40

Wire = TypeVar("Wire", bound=BaseModel)


def parse_body(model: type[Wire], body: bytes) -> Wire:
    """Raises InvalidRequest, which names the first field at fault."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        _explain(model, error)


def _explain(model: type[BaseModel], error: ValidationError) -> NoReturn:
    found = error.errors(include_url=False)[0]
    if found["type"] == "json_invalid":
        raise InvalidRequest(f"The body must be JSON: {found['ctx']['error']}.", code="invalid_json")
    if not found["loc"]:
        raise InvalidRequest(
            f"The body must be a JSON object, not {shown(found['input'])}.", code="invalid_type"
        )
    fields = list(_fields_along(model, found["loc"]))
    param = path_of(loc for loc, _ in fields)
    if found["type"] == "missing":
        refuse(param, f"`{param}` is required: {fields[-1][1]}.", "missing_required_parameter")
    must_be(param, fields[-1][1], found["input"])


def must_be(param: str, allowed: str, given: Any, code: str = "invalid_value") -> NoReturn:
    """Raises InvalidRequest: "`temperature` must be a number from 0 to 2, not 3"."""
    refuse(param, f"`{param}` must be {allowed}, not {shown(given)}.", code)


def refuse(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    raise InvalidRequest(message, param=param, code=code)


def shown(value: Any) -> str:
    """A value in a few characters, as JSON names its kind; a long text isn't sent back whole."""
    if isinstance(value, str):
        cut = value if len(value) <= _SHOWN_CHARACTERS else value[: _SHOWN_CHARACTERS - 1] + "…"
        return f'"{cut}"' if value else "an empty string"
    if isinstance(value, list):
        return "an empty list" if not value else f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"a number of {len(text)} digits"


def path_of(parts: Iterator[str | int]) -> str:
    """The dotted path that OpenAI writes: messages[0].content."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _fields_along(model: type[BaseModel], loc: tuple[str | int, ...]) -> Iterator[tuple[str | int, str]]:
    """The fields of wire models along `loc`, and indices of lists of them, each with what it must be.

    The rest of it (members of unions, items of plain lists) is pydantic's own affair: the field's sentence
    covers them.
    """
    inside: type[BaseModel] | None = model
    allowed = ""
    for part in loc:
        if inside is None:
            return
        if isinstance(part, int):
            yield part, "an object with a `role` and a `content`" if part == loc[-1] else allowed
        elif part in inside.model_fields:
            field = inside.model_fields[part]
            allowed = field.description or "something else"
            yield part, allowed
            inside = _model_in(field.annotation)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
