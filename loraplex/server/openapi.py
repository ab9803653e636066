"""Request bodies in /openapi.json: routes read them themselves (see body.py), so FastAPI is told of their schemas."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from pydantic import BaseModel


@cache
def request_schema(*models: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is one of `models`. The definitions they refer to are put inside."""
    schemas = [_inlined(model.model_json_schema()) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def with_api_keys(schema: dict[str, Any], open_paths: Collection[str]) -> dict[str, Any]:
    """The schema of a server that has keys: every route but `open_paths` takes one. Swagger UI then asks for it."""
    schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        for operation in operations.values() if path not in open_paths else ():
            operation["security"] = [{"key": []}]
    return schema


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without `$defs`: each `$ref` is replaced by what it refers to."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items()}

    resolved: dict[str, Any] = resolve(schema)
    return resolved
