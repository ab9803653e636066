"""Shares of tenants on the real engine, by what its steps computed: nothing here is timed."""

from __future__ import annotations

from benchmarks.fairness import BOUND, LIGHT_PROMPT, costs, light, on_and_off, two_clients


def test_two_clients_that_always_wait_stay_within_the_bound() -> None:
    assert two_clients(200, is_shared=True) <= BOUND
    assert two_clients(200, is_shared=False) > BOUND, "first come, first served does not, so the load says something"


def test_a_client_that_comes_and_goes_gets_its_half_while_it_is_there() -> None:
    least, largest, lack = on_and_off(240, is_shared=True)
    assert lack <= BOUND / 2
    assert least > 0.4
    assert largest < 0.6, "time away is no credit"
    assert on_and_off(240, is_shared=False)[0] < 0.4


def test_a_flood_hardly_delays_one_request() -> None:
    alone = max(each.steps for each in light(6, LIGHT_PROMPT, 0, is_shared=True))
    beside = max(each.steps for each in light(6, LIGHT_PROMPT, 48, is_shared=True))
    assert beside <= 1.5 * alone


def test_shares_take_no_more_steps() -> None:
    by_tenant, first_come = costs(60, is_own=False)
    assert by_tenant.num_steps <= first_come.num_steps / 0.97 + 1
