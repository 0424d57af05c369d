"""Properties of the catalog over arbitrary names: which checkpoints of a folder count, which are kept, and which are
removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from satrap.checkpoint.catalog import Catalog, Version

versions = st.builds(Version, st.integers(1, 30), st.integers(0, 5), st.sampled_from(["", "0123abcd", "89abcdef"]))


@st.composite
def catalogs(draw: st.DrawFn) -> tuple[Catalog, set[str], set[str]]:
    """Return a catalog, and the names of its complete and torn versions. A parent is any older version, complete or
    not."""
    names = draw(st.lists(versions, max_size=12, unique=True))
    whole = {each.name: None for each in names if draw(st.booleans())}
    older = {name: [each.name for each in names if each.number < Version.parse(name).number] for name in whole}  # type: ignore[union-attr]
    parents = {name: draw(st.sampled_from([None, *older[name]])) for name in whole}
    torn = {each.name for each in names} - whole.keys()
    best = [each.name for each in names if draw(st.booleans())]  # may be torn, or removed
    return Catalog(parents, torn, best=best), set(whole), torn


@given(versions)
def test_a_name_parses_to_its_version(version: Version) -> None:
    assert Version.parse(version.name) == version


def test_other_names_do_not_parse() -> None:
    for name in ("1-step-1", "000001-step-1.bak", "000001-step-x", "best-step-1", ".0123abcd.000001-step-1", "",
                 "000001-step-1-0123abc", "000001-step-1-0123abcg", "000001-step-1/x", "000001-step-1\n"):  # fmt: skip
        assert Version.parse(name) is None, name


def numbered(names: set[str]) -> list[Version]:
    return sorted(version for name in names if (version := Version.parse(name)) is not None)


@given(st.lists(versions, max_size=12, unique=True), st.lists(versions, max_size=12), st.sets(versions, max_size=4))
def test_the_newest_and_the_best(whole: list[Version], best: list[Version], torn: set[Version]) -> None:
    """A version that was the best counts only if it is complete."""
    found = Catalog(
        {each.name: None for each in whole}, [each.name for each in torn], best=[each.name for each in best]
    )
    assert found.newest == (max(whole).name if whole else None)
    complete = set(best) & set(whole)
    assert found.best == (max(complete).name if complete else None)


@given(catalogs(), st.integers(1, 4))
def test_what_is_removed(found: tuple[Catalog, set[str], set[str]], keep: int) -> None:
    """The model follows each parent: exactly the newest, the best and what they need is kept."""
    catalog, whole, _ = found
    pending = [each.name for each in numbered(whole)[-keep:]] + [catalog.best] * (catalog.best is not None)
    kept = set[str | None]()
    while pending:
        name = pending.pop()
        kept.add(name)
        pending += [parent for parent in [catalog.parents.get(name or "")] if parent is not None]
    assert catalog.removable(keep) == [each.name for each in numbered(whole - kept)]


@given(catalogs(), st.integers(1, 4))
def test_kept_versions_can_be_resumed(found: tuple[Catalog, set[str], set[str]], keep: int) -> None:
    catalog, whole, _ = found
    removed = set(catalog.removable(keep))
    assert removed <= whole
    kept = whole - removed
    assert len(kept) >= min(keep, len(whole)) and catalog.newest not in removed
    assert catalog.best is None or catalog.best in kept
    for name in kept:
        parent = catalog.parents[name]
        assert parent not in removed, "no parent of a kept version"
    assert not catalog.garbage() or catalog.newest is not None


@given(catalogs())
def test_only_torn_uploads_are_garbage(found: tuple[Catalog, set[str], set[str]]) -> None:
    catalog, _, torn = found
    newest = Version.parse(catalog.newest or "")
    assert set(catalog.garbage()) <= torn
    assert set(catalog.skipped) <= torn and not set(catalog.skipped) & set(catalog.garbage())
    for name in torn:
        version = Version.parse(name)
        assert version is not None
        newer = newest is None or version.number > newest.number
        assert (name in catalog.skipped) == newer
        older = newest is not None and version.number < newest.number
        assert (name in catalog.garbage()) == (older and version.writer != "")
        assert (name in catalog.removed_later) == bool(version.writer)


@given(catalogs(), versions)
def test_no_number_is_reused(found: tuple[Catalog, set[str], set[str]], used: Version) -> None:
    catalog, whole, torn = found
    known = Catalog(catalog.parents, torn, [used.name])
    made = known.next(7, "")
    assert made == (1 + max(each.number for each in (used, *numbered(whole | torn))), 7, "")
    for name in whole | torn:
        assert known.is_newer(made.name, name) and not known.is_newer(name, made.name)
        assert not known.is_newer(name, name) and known.is_newer(name, None)
    assert known.is_newer("000005-step-1-0123abcd", "000005-step-1-89abcdef"), "another version of the same number"
    assert known.is_newer(made.name, "of another folder") and not known.is_newer("no version", None)


def test_the_first_version_of_a_folder() -> None:
    assert Catalog({}, []).next(3, "0123abcd").name == "000001-step-3-0123abcd"
    assert Version.parse("000001-step-3") == (1, 3, "")
    assert Catalog({}, ["000001-step-3"]).skipped == ["000001-step-3"] and not Catalog({}, ["000001-step-3"]).garbage()


def test_versions_that_name_each_other_as_parents_are_kept() -> None:
    """No save writes that; a damaged folder must not hang a save."""
    one, other = "000001-step-1", "000002-step-2"
    assert Catalog({one: other, other: one}, []).removable(1) == []
