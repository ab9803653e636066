"""Chat templates of adapters, rendered in processes of their own: `TemplateProcesses` here, `main` over there.

A template is a program, and an adapter's comes from a stranger. The sandbox of `chat_template` bounds what it reaches;
`processes.bounded` bounds what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from loraplex.errors import AdapterBusyError, AdapterUnavailableError, InvalidRequestError, shown
from loraplex.processes.bounded import BoundedProcesses, BoundedWork, answer_questions
from loraplex.text.chat_template import Json, check_template, render_chat, render_open_chat
from loraplex.text.utf8 import decode_in_pieces

MAX_RENDER_CPU_S = 0.5
"""Ordinary ones take milliseconds. Other chats through adapters' templates wait as long, where two clients have both
processes."""

WORK = BoundedWork(
    name="chat templates of adapters",
    module="loraplex.text.template_process",
    cpu_s=MAX_RENDER_CPU_S,
    answer_s=30.0,
    growth_bytes=2**29,
    kept_bytes=2**26,  # compiled templates, and what they hold
    answer_bytes=2**25,
    busy=AdapterBusyError,
    unavailable=AdapterUnavailableError,
)


class TemplateProcesses:
    """Any thread may call it, and waits where all processes are busy. The first render starts a process."""

    def __init__(self, work: BoundedWork = WORK) -> None:
        self._processes = BoundedProcesses(work)
        self.close = self._processes.close

    def check(self, templates: Mapping[str, str]) -> None:
        """Raises InvalidRequestError for one that cannot be compiled; all together have the time of one render."""
        self._ask({"templates": dict(templates)})

    def render(self, source: str, variables: Mapping[str, Json], is_open: bool = False) -> str:
        """`render_chat`, or `render_open_chat`; also raises InvalidRequestError for a template that costs too much."""
        return self._ask({"source": source, "variables": dict(variables), "is_open": is_open})

    def _ask(self, question: dict[str, Json]) -> str:
        told = self._processes.ask(question)
        text: str | None = None
        with suppress(UnicodeDecodeError):  # an answer comes from where a stranger's program runs
            text = None if told is None else decode_in_pieces(told, errors="surrogatepass")
        if text is None:
            raise InvalidRequestError(
                f"the chat template of this adapter needs more than {MAX_RENDER_CPU_S:g} s or too much memory, and was "
                "ended: correct it in the adapter's directory",
                param="messages",
            )
        return text


# ------------------------------------------------------------------------------------------------- in the process


def main() -> None:
    answer_questions(WORK, _answer)


def _answer(question: Mapping[str, Any]) -> str:
    if "templates" in question:
        return _check(question["templates"])
    render = render_open_chat if question["is_open"] else render_chat
    return render(question["source"], question["variables"])


def _check(templates: Mapping[str, str]) -> str:
    for name, source in templates.items():
        try:
            check_template(source)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"chat template {shown(name)}: {error.message}", param=error.param) from error
    return ""


if __name__ == "__main__":
    main()
