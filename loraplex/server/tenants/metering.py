"""Limits and usage at the routes that generate: decided once a request, before it is queued, and counted by a thread.

Where there are no tenants a request has no charge, and nothing here runs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loraplex.adapters.registry.adapter_name import split_address
from loraplex.core import AdapterChoice, AdapterMix, FinishReason, RequestOutput, SamplingParams
from loraplex.errors import (
    EngineDeadError,
    EngineOverloadedError,
    EngineShutdownError,
    LoraplexError,
    PromptTooLongError,
    TenantLimitError,
)
from loraplex.server.auth import Caller
from loraplex.tenants.directory import TenantDirectory
from loraplex.tenants.limits import Allowance, Limits, TenantMeter
from loraplex.tenants.service_level import ServiceLevel
from loraplex.tenants.usage import OF_MIXES, Tab, UsageBook

Clock = Callable[[], float]

REFUSALS = (EngineOverloadedError, EngineDeadError, EngineShutdownError)
SENT_ELSEWHERE = (EngineOverloadedError, EngineShutdownError)
"""A router sends what was refused so to another server, which counts it."""


class Accounts:
    """The meters and the usage of one server's tenants. `admit` and `end` run on its event loop, `count` in the thread
    that writes."""

    def __init__(self, directory: TenantDirectory, clock: Clock = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._meters: dict[str, TenantMeter] = {}
        self._lock = threading.Lock()
        self.book = UsageBook(directory.store, self._count)

    def charge(
        self, caller: Caller, prompts: Sequence[tuple[AdapterChoice, int, int]], *, is_prompt_alone: bool = False
    ) -> Charge | None:
        """prompts: adapter, tokens and completions of each; is_prompt_alone: no new token is asked for. None: there are
        no tenants."""
        if not self._directory.table.is_configured:
            return None
        now_s = self._clock()
        tabs = [
            Tab(caller.fingerprint, caller.scope.tenant or "", billed(choice), num_tokens, now_s, is_prompt_alone)
            for choice, num_tokens, _ in prompts
        ]
        return Charge(self, caller, tabs, sum(each[1] for each in prompts), sum(each[2] for each in prompts))

    def admit(self, charge: Charge) -> dict[str, Allowance]:
        """What is left then. Raises TenantLimitError."""
        limits, tenant = limits_of(charge.caller), charge.caller.scope.tenant
        if tenant and limits == NO_LIMITS:
            with self._lock:
                if tenant in self._meters:  # a debt ends with the limit
                    self._meters[tenant].set_limits(limits, self._clock())
        if tenant and limits != NO_LIMITS:
            with self._lock:
                now_s = self._clock()
                meter = self._meters.setdefault(tenant, TenantMeter(limits, now_s))
                meter.set_limits(limits, now_s)
                try:
                    meter.admit(charge.num_prompt_tokens, charge.num_completions, now_s)
                except TenantLimitError as error:
                    error.headers = _headers(meter.allowances(now_s))
                    raise
                charge.meter = meter
                allowances = meter.allowances(now_s)
        else:
            allowances = {}
        for tab in charge.tabs:
            self.book.open(tab)
        return allowances

    def end(self, charge: Charge) -> None:
        for tab in charge.tabs:
            self.book.end(tab)
        if charge.meter is not None:
            with self._lock:
                charge.meter.end(charge.num_completions)
            charge.meter = None

    def give_back(self, charge: Charge, num_tokens: int) -> None:
        with self._lock:
            if charge.meter is not None:
                charge.meter.count_tokens(-num_tokens)

    def now_s(self) -> float:
        return self._clock()

    def _count(self, tenant: str, num_tokens: int) -> None:
        with self._lock:
            if tenant in self._meters:
                self._meters[tenant].count_tokens(num_tokens)


@dataclass(eq=False, slots=True)
class Charge:
    """What one request costs: `begin` before it is queued, `end` whatever became of it."""

    accounts: Accounts
    caller: Caller
    tabs: list[Tab]
    num_prompt_tokens: int
    num_completions: int
    meter: TenantMeter | None = None
    headers: dict[str, str] = field(default_factory=dict)
    _has_begun: bool = False

    def begin(self) -> None:
        """Raises TenantLimitError."""
        self.headers = _headers(self.accounts.admit(self))
        self._has_begun = True

    def see(self, index: int, output: RequestOutput) -> None:
        """What the engine has drawn for a prompt, whether its client has read it or not."""
        tab = self.tabs[index]
        if tab.output is None:
            tab.first_s = self.accounts.now_s()
        tab.output = output

    def fail(self, error: LoraplexError) -> None:
        """Those that have not finished ended in an error. Prompts that the engine refused are given back."""
        if isinstance(error, REFUSALS):
            self.accounts.give_back(self, sum(tab.num_prompt_tokens for tab in self.tabs if tab.output is None))
        for tab in self.tabs:
            tab.has_failed = tab.output is None or not tab.output.finished or was_aborted(tab.output)
            tab.is_refused = tab.output is None and isinstance(error, SENT_ELSEWHERE)

    def end(self) -> None:
        if self._has_begun:
            self._has_begun = False
            self.accounts.end(self)


def was_aborted(output: RequestOutput) -> bool:
    return any(each.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) for each in output.outputs)


def limits_of(caller: Caller) -> Limits:
    tenant = caller.scope.table.tenants.get(caller.scope.tenant or "")
    return NO_LIMITS if tenant is None else tenant.limits


def service_of(caller: Caller) -> ServiceLevel:
    tenant = caller.scope.table.tenants.get(caller.scope.tenant or "")
    return DEFAULT_SERVICE if tenant is None else tenant.service


def within_context(params: SamplingParams, num_prompt_tokens: int, limits: Limits, *, is_asked: bool) -> SamplingParams:
    """With a `max_tokens` that fits into a tenant's context. is_asked: the client said how many; any other number is a
    default, and is made smaller. Raises PromptTooLongError."""
    most = limits.max_context
    if most is None:
        return params
    wanted = params.max_tokens if is_asked and params.max_tokens is not None else 1
    if num_prompt_tokens + wanted > most:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {wanted}: together at most {most} are for "
            "this tenant; send a shorter prompt, or ask for fewer tokens",
            param="max_tokens",
        )
    left = most - num_prompt_tokens
    return params if (params.max_tokens or math.inf) <= left else params.with_max_tokens(left)


def billed(choice: AdapterChoice) -> str:
    """The adapter's registered name, without a version."""
    if choice is None or isinstance(choice, AdapterMix):
        return "" if choice is None else OF_MIXES
    address = split_address(choice)
    return choice if address is None else address[0]


def _headers(allowances: Mapping[str, Allowance]) -> dict[str, str]:
    """OpenAI's, for what has a limit."""
    headers = {}
    for name, left in allowances.items():
        headers[f"x-ratelimit-limit-{name}"] = str(left.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(left.remaining)
        headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(left.reset_s * 1000) / 1000:g}s"
    return headers


NO_LIMITS = Limits()
DEFAULT_SERVICE = ServiceLevel()
