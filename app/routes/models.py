"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from app.errors import json_response
from app.protocol.responses import Model, ModelList
from app.routes.documentation import describe_errors
from app.routes.services import Services
from model_runner.errors import ModelNotFound


def models_router(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["models"])
    created = int(time.time())

    def served() -> dict[str, Any]:
        return {
            "id": services.settings.served_model_name,
            "object": "model",
            "created": created,
            "owned_by": "plimsoll",
            "max_model_len": services.engine.model.max_model_len,
        }

    @router.get("/models", response_model=None, responses={200: {"model": ModelList}, **describe_errors(401)})
    async def list_models() -> Response:
        """The models that are served: one."""
        return json_response({"object": "list", "data": [served()]})

    # A name may hold slashes, as hub ids do.
    @router.get(
        "/models/{model_id:path}",
        response_model=None,
        responses={200: {"model": Model}, **describe_errors(401, 404), "4XX": {"description": "Refused."}},
    )
    async def get_model(model_id: str) -> Response:
        """One model by its name."""
        if model_id != services.settings.served_model_name:
            raise ModelNotFound(
                f"The model `{model_id[:200]}` does not exist here; "
                f"this server serves `{services.settings.served_model_name}`.",
                param="model",
            )
        return json_response(served())

    return router
