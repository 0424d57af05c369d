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
        if name in catalog.garbage():
            assert version.writer and newest is not None and version.number < newest.number
        assert (name in catalog.removed_later) == bool(version.writer)


@given(catalogs(), versions)
def test_no_number_is_reused(found: tuple[Catalog, set[str], set[str]], used: Version) -> None:
    catalog, whole, torn = found
    known = Catalog(catalog.parents, torn, [used.name])
    made = known.next(7, "")
    assert all(made.number > Version.parse(name).number for name in (*whole, *torn, used.name))  # type: ignore[union-attr]
    for name in whole | torn:
        assert known.is_newer(made.name, name) and not known.is_newer(name, made.name)
        assert not known.is_newer(name, name) and known.is_newer(name, None)
    assert known.is_newer("000005-step-1-0123abcd", "000005-step-1-89abcdef"), "another version of the same number"
