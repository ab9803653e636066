"""Verbs through the router that wait for requests (`deadline_s`): which ones do, and that none keeps others waiting."""

from __future__ import annotations

import pytest

from tests.router.parts import replicas, router
from tests.router.test_verbs import HEADER


@pytest.mark.parametrize(("path", "status"), [("/v1/adapters/sql/evict", 200), ("/v1/adapters/switch", 400)])
async def test_a_verb_that_names_nothing_is_not_looked_for(path: str, status: int) -> None:
    """It was a 500, and went on at the first replica alone when its turn was over."""
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await front.until(lambda: front.fleet.num_open == 2)
        answer = await front.client.post(path, json={"deadline_s": 5})
        assert answer.status_code == status, answer.text
        assert answer.headers[HEADER] == (f"{a.name}, {b.name}" if status == 200 else a.name)
