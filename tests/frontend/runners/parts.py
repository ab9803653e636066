"""The demo's adapters by name and number, and how requests ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from loraplex import LoRARequest
from loraplex.core import RequestOutput
from loraplex.demo.tasks import TASKS, adapter_path, prompt_of
from loraplex.errors import LoraplexError
from tests.frontend.processes import rest

ADAPTERS = tuple(task.name for task in TASKS)
NUMBERED = {name: LoRARequest(name, number, str(adapter_path(name))) for number, name in enumerate(ADAPTERS, 1)}
PROMPT = prompt_of("banana bread")


def said(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(each.index, each.text, each.token_ids, each.finish_reason) for each in output.outputs]


async def end_of(stream: AsyncIterator[RequestOutput]) -> RequestOutput | LoraplexError:
    try:
        return (await rest(stream))[-1]
    except LoraplexError as error:
        return error
