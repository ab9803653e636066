"""Counting the tokens of one request, over all its prompts and completions."""

from __future__ import annotations

from loraplex.core import RequestOutput
from loraplex.server.responses import PromptTokensDetails, Usage


class UsageCounter:
    """`add` may be called with each cumulative output: the last one of a prompt counts."""

    def __init__(self, is_echo_only: bool = False, *, shows_cached: bool = True) -> None:
        self._is_echo_only = is_echo_only
        self._shows_cached = shows_cached
        self._prompts: dict[int, tuple[int, int, int]] = {}

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        num_output = 0 if self._is_echo_only else sum(len(each.token_ids) for each in output.outputs)
        self._prompts[prompt_index] = (len(output.prompt_token_ids), num_output, output.num_cached_tokens)

    def usage(self) -> Usage:
        counts = self._prompts.values()
        num_prompt, num_output, num_cached = (sum(each[i] for each in counts) for i in range(3))
        details = PromptTokensDetails(num_cached) if self._shows_cached else None
        return Usage(num_prompt, num_output, num_prompt + num_output, details)
