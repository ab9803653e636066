"""State vectors V1 and V2 of docs: device room for two equal adapters, host for three; lists in slot order."""

from __future__ import annotations

import re

import pytest

from loraplex.errors import AdapterError, AdapterNoRoomError
from tests.memory.rig import Rig

V1 = """
add1 act1 -> [1,-]; add1 -> False; act1 -> False; add2 act2 -> [1,2]; add3 -> True; act3 -> no room; [1,2];
rem2 -> [1,-]; rem2 -> False; rem1; add1 add2 -> [-,-]; act3 -> [3,-]; act2 -> [3,2]
"""
V2 = """
add1 act1 -> [1,-]; add1 -> False; act1 -> False; add2 act2 -> [1,2]; add3 act3 -> [3,2]; rem2 -> [3,-]; rem2 -> False;
rem1; rem1 -> False; add1 act1 -> [3,1]; add2; deact3 -> [-,1]; act2 -> [2,1]; act3 -> [2,3]; pin2 -> [2,3];
act1 -> [2,1]; deact2 -> [-,1]; act3 -> [3,1]; pin3 pin1; pin2 -> no room; act2 -> no room; [3,1]; deact3;
pin2 -> [2,1]; rem3; pin3 -> error
"""


def run(rig: Rig, vector: str) -> None:
    verbs = {
        "add": lambda i: rig.manager.add_adapter(rig.spec(i)).is_new,
        "act": rig.activate,
        "rem": rig.manager.remove_adapter,
        "deact": rig.manager.deactivate_adapter,
        "pin": rig.pin,
    }
    for statement in vector.replace("\n", " ").split(";"):
        calls, _, expected = statement.partition("->")
        *before, last = re.findall(r"([a-z]+)(\d)", calls) or [("", "")]
        for verb, adapter_id in before:
            assert verbs[verb](int(adapter_id)), statement
        _check(rig, verbs.get(last[0]), last[1], expected.strip() or calls.strip(), statement)
        rig.manager.check_integrity()


def _check(rig: Rig, verb, adapter_id: str, expected: str, statement: str) -> None:
    errors = {"no room": AdapterNoRoomError, "error": AdapterError}
    if expected in errors:
        before = rig.slots()
        with pytest.raises(errors[expected]):
            verb(int(adapter_id))
        assert rig.slots() == before, statement
    elif verb is not None:
        assert verb(int(adapter_id)) is (expected != "False"), statement
    if expected.startswith("["):
        wanted = [None if entry == "-" else int(entry) for entry in expected.strip("[]").split(",")]
        assert rig.slots() == wanted, statement


@pytest.mark.parametrize("is_bound_by_count", [False, True], ids=["by bytes", "by count"])
@pytest.mark.parametrize("is_separate", [False, True], ids=["one memory", "two memories"])
@pytest.mark.parametrize(("policy", "vector"), [("none", V1), ("lru", V2)], ids=["V1", "V2"])
def test_state_vector(policy: str, vector: str, is_separate: bool, is_bound_by_count: bool) -> None:
    rig = Rig(policy=policy, is_separate=is_separate, is_bound_by_count=is_bound_by_count)
    run(rig, vector)
    for adapter_id in (1, 2, 3):
        rig.manager.remove_adapter(adapter_id)
    rig.check_empty()
    rig.manager.close()
