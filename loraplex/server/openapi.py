"""/openapi.json: what each route takes and answers. Routes read bodies themselves, so FastAPI is told of them here.

A route names its bodies, its replies and errors of its own in `operation`; `DescribedApi` adds those of all routes.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel

from loraplex.server.api_error import ErrorReply
from loraplex.server.auth import KEY_HEADER
from loraplex.server.streaming import EVENT_STREAM
from loraplex.server.wires.anthropic_errors import AnthropicError, is_anthropic
from loraplex.server.wires.native_forms import FORMS

Schema = dict[str, Any]

DESCRIPTIONS = {
    400: "The request cannot be served as it is; `param` names the field",
    401: "No valid API key",
    403: "The server may not do this",
    404: "No such model, adapter or path",
    408: "The request took too long to arrive",
    409: "Not in the present state",
    412: "What a header expects is not so",
    413: "The body is too long",
    415: "The body is not declared as what the route reads",
    429: "Too much of this client waits; `Retry-After` says when to come again",
    431: "The request line and headers are too long",
    499: "The request was aborted",
    500: "A mistake of the server; its log has it under the request's id",
    502: "The hub answered with an error",
    503: "Not now; `Retry-After` says when to come again, if that is known",
    504: "The hub or the engine did not answer in time, or the time of the request has passed",
    507: "The disk of the server, or its folder of uploads, is full",
}
OF_ALL = (400, 403, 408, 431, 500, 503)
OF_BODIES = (413, 415, 429)
OF_ADAPTERS = (403, 404, 409, 429, 499, 502, 504, 507)
OF_GENERATION = (404, 429, 499, 504)

_EVENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("data", "event", "id")}}
_SCHEMES: Schema = {
    "key": {"type": "http", "scheme": "bearer"},
    "anthropic_key": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
}
_ERROR = {"$ref": "#/components/schemas/Error"}
_ANTHROPIC_ERROR = {"$ref": "#/components/schemas/AnthropicError"}


@cache
def operation(
    *bodies: type[BaseModel],
    replies: tuple[Any, ...] = (),
    text_type: str | None = None,
    statuses: tuple[int, ...] = (200,),
    errors: tuple[int, ...] = (),
) -> Schema:
    """`openapi_extra` of a route: its body is one of `bodies`, its answer one of `replies` or a text of `text_type`."""
    content: Schema = {}
    if replies:
        content["application/json"] = {"schema": _one_of([_schema_of(each) for each in replies])}
    if text_type is not None:
        content[text_type] = {"schema": _EVENT if text_type == EVENT_STREAM else {"type": "string"}}
    done = {"description": "Done", "content": content}
    failed = _errors((*errors, *(OF_BODIES if bodies else ())))
    described: Schema = {"responses": {**{str(status): done for status in statuses}, **failed}}
    if bodies:
        schema = _one_of([_inlined(model.model_json_schema()) for model in bodies])
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described


def _one_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


class DescribedApi(FastAPI):
    """FastAPI with the whole truth in its schema. `open_paths` need no key; None: there are no keys."""

    open_paths: Collection[str] | None = None

    def openapi(self) -> Schema:
        if self.openapi_schema is None:
            schema = super().openapi()
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas |= {"Error": _schema_of(ErrorReply), "AnthropicError": _schema_of(AnthropicError)}
            if self.open_paths is not None:
                schema["components"]["securitySchemes"] = _SCHEMES
            for path, operations in schema["paths"].items():
                has_key = self.open_paths is not None and path not in self.open_paths
                for each in operations.values():
                    for parameter in each.get("parameters", ()):
                        found = _without_null(parameter["schema"])
                        parameter["schema"] = _in_url(found) if parameter["in"] in ("path", "query") else found
                    if has_key:
                        each["security"] = [{name: []} for name in _SCHEMES]  # Swagger UI then asks for it
                    each["responses"].pop("422", None)  # FastAPI's own guess: errors of a query are 400 here
                    each["responses"] |= _errors((*OF_ALL, 401) if has_key else OF_ALL)
                    failed = [int(status) for status in each["responses"] if status >= "400"]
                    if is_anthropic(path):
                        each["responses"] |= _errors(failed, _one_of([_ANTHROPIC_ERROR, _ERROR]))  # of a head: ours
                    elif path in FORMS:
                        each["responses"] |= _errors(failed, _one_of([_ERROR, _schema_of(FORMS[path])]))
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            self.openapi_schema = schema
        return self.openapi_schema


def _errors(statuses: Collection[int], schema: Schema = _ERROR) -> Schema:
    return {
        str(status): {"description": DESCRIPTIONS[status], "content": {"application/json": {"schema": schema}}}
        for status in statuses
    }


def _without_null(schema: Schema) -> Schema:
    """Of a parameter, which a query or a header has or lacks: no text of theirs is null."""
    others = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    return schema if len(others) != 1 else {**others[0], "title": schema["title"]}


def _in_url(schema: Schema) -> Schema:
    """Texts of a path or query have no control characters (`urls.fault_of_url`)."""
    if "items" in schema:
        return {**schema, "items": _in_url(schema["items"])}
    if "anyOf" in schema:
        return {**schema, "anyOf": [_in_url(each) for each in schema["anyOf"]]}
    is_any_text = schema.get("type") == "string" and not schema.keys() & {"pattern", "enum", "format", "const"}
    return {**schema, "pattern": r"^[^\x00-\x1f\x7f]*$"} if is_any_text else schema


def _schema_of(reply: Any) -> Schema:
    return _inlined(msgspec.json.schema(reply))


def _inlined(schema: Schema) -> Schema:
    """A schema without `$defs`: each `$ref` is replaced by what it refers to."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        if "prefixItems" in node:  # of which programs that read OpenAPI know little
            kinds = node["prefixItems"]
            node = {**node, "items": {"anyOf": kinds}}
            del node["prefixItems"]
        return {key: resolve(value) for key, value in node.items()}

    resolved: Schema = resolve(schema)
    return resolved
