"""What must be true of the table of names at any moment; tests call it."""

from __future__ import annotations

from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.version import AdapterVersion


def check_integrity(table: NameTable) -> None:
    """Raises AssertionError unless names, numbers, versions, aliases and histories fit together."""
    _check_versions(table)
    current, aliases, numbers = table.current, table.aliases, table.numbers
    has_usage = all(table.usage(name).num_loads for name in current)
    _check(table.last_numbers.keys() == current.keys() and has_usage, "a name has no counters")
    aliases.check_integrity()
    _check(all(name in current for name in aliases), "an alias has no version of its own")
    _check(not any(aliases.is_target(name) for name in aliases), "an alias points to an alias")
    _check(table.history.names <= current.keys(), "a history has no name")
    _check(all(_is_remembered_right(table, name) for name in current), "a name has another history than versions")
    _check(numbers.is_consistent, "numbers do not match names")
    _check(numbers.names <= current.keys() | table.verbs.keys(), "a number has no adapter")
    _check(all(_is_numbered_right(table, version) for version in current.values()), "a version has another number")


def _check_versions(table: NameTable) -> None:
    current = table.current
    draining = [version for versions in table.draining.values() for version in versions]
    kept = [version for versions in table.kept.values() for version in versions]
    ids = [version.adapter_id for version in (*current.values(), *kept, *draining)]
    _check(len(ids) == len(set(ids)), "a version is there twice")
    _check(
        set(ids) == {version.adapter_id for version in table.versions()},
        "the versions by id are not the current, kept and draining ones",
    )
    _check(table.kept.keys() <= current.keys(), "a kept version has no name")
    _check(all(len(each) < table.max_versions_kept for each in table.kept.values()), "too many versions are kept")
    _check(not any(version.is_pinned for version in kept), "a kept version is pinned")
    _check(all(name == version.ref.adapter_name for name, version in current.items()), "a name has another's version")
    _check(all(version.num_references >= 0 for version in table.versions()), "a count of references is negative")
    _check(all(version.is_to_be_dropped for version in draining), "a draining version would never be dropped")
    is_any_dropped = any(version.is_to_be_dropped for version in (*current.values(), *kept))
    _check(not is_any_dropped, "a registered version would be dropped")


def _is_remembered_right(table: NameTable, name: str) -> bool:
    """The history has each kept version, in order, and the current one while another adapter answers.

    It does not have what answers now.
    """
    numbers, kept = table.history.numbers(name), [version.number for version in table.kept.get(name, ())]
    current, alias_of = table.current[name].number, table.aliases.get(name)
    is_current_right = (current in numbers) == (alias_of is not None)
    has_answer = alias_of is not None and alias_of in table.history.of(name)
    return is_current_right and not has_answer and [each for each in numbers if each != current] == kept


def _is_numbered_right(table: NameTable, version: AdapterVersion) -> bool:
    name = version.ref.adapter_name
    verb = table.verbs.get(name)
    return (verb is not None and verb.brought_number) or version.ref.lora_int_id == table.numbers.of(name)


def _check(is_fine: bool, what: str) -> None:
    assert is_fine, f"the table of adapter names is broken: {what}"
