"""Sources that the operator names: how they are written, which place a name has, and that none leads out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.registry import NameQuery
from loraplex.adapters.sources.named import NamedSource, NamedSources
from loraplex.errors import ConfigError, InvalidRequestError


def add(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two adapters, a link to one of them, and what leads outside or is none."""
    root = tmp_path / "root"
    add(root / "sql")
    add(root / "größe")
    add(root / ".hidden")
    add(root / "deep/er")
    outside = add(tmp_path / "outside")
    (root / "inner").symlink_to(root / "sql")
    (root / "outer").symlink_to(outside)
    (root / "self").symlink_to(root)
    (root / "adapter_config.json").write_text("{}")
    (root / "loop").symlink_to(root / "loop")
    (root / "empty").mkdir()
    add(root / "mixed")
    (root / "mixed/adapter_model.safetensors").symlink_to(outside / "adapter_config.json")
    return root


def source(place: object, name: str = "dir") -> NamedSource:
    return NamedSource.parse(f"{name}={place}")


@pytest.mark.parametrize(
    "given", ["", "=", "a=", "=/x", "A=/x", "a/b/c=/x", "a b=/x", "/a=/x", "a=ftp://x", "a=s3://", "a=hf://o/r/../x"]
)
def test_what_is_no_source(given: str) -> None:
    with pytest.raises(ConfigError, match="adapter source"):
        NamedSource.parse(given)


def test_a_source_given_twice() -> None:
    assert len(NamedSources.parse(["a=/x", "t/a=/x"]).sources) == 2
    with pytest.raises(ConfigError, match="'t/a' is given twice"):
        NamedSources.parse(["t/a=/x", "a=/y", "t/a=/z"])
    with pytest.raises(ConfigError, match="at most 64"):
        NamedSources.parse(f"a{index}=/x" for index in range(65))


@pytest.mark.parametrize("name", ["sql", "inner", "größe"])
def test_adapters_of_a_directory(root: Path, name: str) -> None:
    path = source(root).path_of(name)
    assert path == str((root / name).resolve())


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../outside", "outer", "self", "loop", "empty", "mixed", "missing", ".hidden", "deep/er"),
        *("deep", "/etc", "a\0b", "sql/", "sql/.", "ﬁ", "sql@1", "sql@main", "x" * 300, "adapter_config.json"),
    ],
)
def test_what_a_directory_has_not(root: Path, name: str) -> None:
    """Nothing outside it, no place below another, no other spelling."""
    assert source(root).path_of(name) is None


@given(name=st.text(alphabet=st.sampled_from("ab./\\@~\0% ") | st.characters(), max_size=12))
def test_no_name_leads_out_of_any_source(name: str) -> None:
    for place in ("hf://org", "hf://org/repo@main", "s3://bucket/prefix", "hf://", "/proc/self"):
        path = source(place).path_of(name)
        top = place.partition("@")[0].removesuffix("/") + "/"
        parts = [] if path is None else path.removeprefix(top.replace("hf://", "hf://", 1)).partition("@")[0].split("/")
        assert path is None or (path.startswith(top) and not {"", ".", ".."}.intersection(parts) and "@" not in name)


@pytest.mark.parametrize(
    ("place", "name", "path"),
    [
        ("hf://org", "sql", "hf://org/sql"),
        ("hf://", "org/sql", "hf://org/sql"),
        ("hf://", "sql", None),
        ("hf://org", "org/sql", None),
        ("hf://org/repo", "sql", "hf://org/repo/sql"),
        ("hf://org/repo/adapters@v1", "sql", "hf://org/repo/adapters/sql@v1"),
        ("hf://org", "sql@refs/pr/1", None),
        ("s3://bucket", "sql", "s3://bucket/sql"),
        ("s3://bucket/all/", "sql", "s3://bucket/all/sql"),
        ("s3://bucket", "größe", None),
    ],
)
def test_adapters_elsewhere(place: str, name: str, path: str | None) -> None:
    assert source(place).path_of(name) == path


def test_whose_source_it_is() -> None:
    """A tenant has its own before the public ones, and one of its own hides another of that name."""
    sources = NamedSources.parse(["hub=hf://org", "beta/own=/beta", "acme/hub=/acme", "more=s3://bucket"])
    assert [each.place for each in sources.of("")] == ["hf://org", "s3://bucket"]
    assert [each.place for each in sources.of("acme")] == ["/acme", "s3://bucket"]

    def place(written: str, tenant: str) -> tuple[str, str]:
        found = sources.split(written, tenant)
        assert found is not None
        return found[0].place, found[1]

    assert place("sql", "") == ("hf://org", "sql")
    assert place("more/sql", "") == ("s3://bucket", "sql")
    assert place("own/sql", "") == ("hf://org", "own/sql")
    assert place("sql", "beta") == place("own/sql", "beta") == ("/beta", "sql")
    assert place("hub/sql", "acme") == ("/acme", "sql")
    assert NamedSources().split("sql", "") is None
    names = [(named and named.place) for named in (sources.named(each, "acme") for each in ("hub", "local", "s3", "x"))]
    assert names == ["/acme", "/acme", "s3://bucket", None]


def test_pages_of_a_directory(root: Path) -> None:
    def names(limit: int = 10, **query: str) -> list[str]:
        return source(root).names(NameQuery(is_sorted=True, **query), limit)

    assert names() == ["größe", "inner", "sql"]
    assert names(limit=2) == ["größe", "inner"]
    assert names(after="inner") == ["sql"]
    assert names(prefix="s") == names(contains="q") == ["sql"]
    with pytest.raises(InvalidRequestError, match="does not list"):
        source("hf://org").names(NameQuery(), 1)
