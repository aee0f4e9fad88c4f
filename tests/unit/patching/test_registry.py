"""The patch registry on throw-away packages: check, apply all or nothing, verify, undo exactly."""

import functools
import importlib
import inspect
import sys
import types
from typing import Any

import pytest

from megatron_ntp.patching import (
    Expected,
    Patch,
    PatchError,
    Registry,
    Status,
    diff_snapshots,
    identity_snapshot,
)

BASE = """
    import functools

    def twice(x, *, times=2):
        "Doc of twice."
        return x * times

    class Thing:
        def method(self, x):
            return ("method", x)

        @staticmethod
        def static(x):
            return ("static", x)

        @classmethod
        def make(cls, x):
            return (cls.__name__, x)

        @property
        def size(self):
            "Doc of size."
            return 7

        @functools.cached_property
        def lazy(self):
            return 9

    class Child(Thing):
        pass

    FLAG = False
"""

USER = """
    import functools
    from PKG.base import twice as g, Thing as T
    from PKG import base

    bound = base.Thing().method
    part = functools.partial(base.twice, 3)

    class Holder:
        helper = staticmethod(base.twice)
        method_alias = base.Thing.method
"""


def tag(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A replacement whose results show that it ran."""
    return "patched", original(*args, **kwargs)


def other(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A second one, to see the order."""
    return "other", original(*args, **kwargs)


def row(target: str, name: str = "row", **fields: Any) -> Patch:
    """A row with the fields a test does not care about filled in."""
    return Patch(name, target, fields.pop("replacement", tag), "a test", **fields)


def registry(package: str, *rows: Patch, version: str = "1.0") -> Registry:
    """A registry that leaves nothing out."""
    return Registry(package, version, rows, exclude=())


@pytest.fixture
def pkg(make_package: Any) -> tuple[str, Any, Any]:
    """The package above: its name, its base module and the module that made aliases."""
    name = make_package(base=BASE, user=USER)
    return name, importlib.import_module(f"{name}.base"), importlib.import_module(f"{name}.user")


# ---- apply and undo -----------------------------------------------------------------------------


def test_function_is_wrapped_at_every_alias_and_restored(pkg: Any) -> None:
    name, base, user = pkg
    before = identity_snapshot(name)
    patches = registry(name, row(f"{name}.base:twice")).apply()
    assert base.twice(2) == user.g(2) == user.Holder.helper(2) == ("patched", 4)
    assert user.part() == ("patched", 6)
    assert base.twice is user.g
    assert patches.verify() == []
    assert len(patches.sites) == 4
    patches.undo()
    assert diff_snapshots(before, identity_snapshot(name)) == []
    assert user.g(2) == user.part() - 2 == 4


def test_wrapper_keeps_metadata(pkg: Any) -> None:
    name, base, _ = pkg
    original = base.twice
    with registry(name, row(f"{name}.base:twice", name="mark")):
        assert base.twice.__wrapped__ is original
        assert base.twice.__ntp_patch__ == "mark"
        assert base.twice.__doc__ == "Doc of twice."
        assert inspect.signature(base.twice) == inspect.signature(original)
    assert base.twice is original


@pytest.mark.parametrize(
    ("attr", "use", "expected"),
    [
        ("method", lambda base: base.Thing().method(1), ("method", 1)),
        ("static", lambda base: base.Thing.static(1), ("static", 1)),
        ("static", lambda base: base.Thing().static(1), ("static", 1)),
        ("make", lambda base: base.Child.make(1), ("Child", 1)),
        ("size", lambda base: base.Thing().size, 7),
        ("lazy", lambda base: base.Thing().lazy, 9),
    ],
)
def test_every_kind_of_attribute(pkg: Any, attr: str, use: Any, expected: Any) -> None:
    name, base, _ = pkg
    before, kind = identity_snapshot(name), type(vars(base.Thing)[attr])
    with registry(name, row(f"{name}.base:Thing.{attr}")) as patches:
        assert use(base) == ("patched", expected)
        assert type(vars(base.Thing)[attr]) is kind
        assert patches.verify() == []
    assert use(base) == expected
    assert diff_snapshots(before, identity_snapshot(name)) == []


def test_property_keeps_doc_and_setter(make_package: Any) -> None:
    name = make_package(
        base="""
        class Box:
            n = 1
            @property
            def size(self):
                "Doc."
                return self.n
            @size.setter
            def size(self, value):
                self.n = value
        """
    )
    base = importlib.import_module(f"{name}.base")
    with registry(name, row(f"{name}.base:Box.size")):
        box = base.Box()
        box.size = 5
        assert box.size == ("patched", 5)
        assert base.Box.size.__doc__ == "Doc."


def test_bound_method_alias_keeps_its_object(pkg: Any) -> None:
    name, _, user = pkg
    bound = user.bound
    with registry(name, row(f"{name}.base:Thing.method")):
        assert user.bound(3) == ("patched", ("method", 3))
        assert user.bound.__self__ is bound.__self__
        assert user.Holder().method_alias(4) == ("patched", ("method", 4))
    assert user.bound is bound


def test_inherited_attribute_is_set_on_the_child_only_and_deleted_again(pkg: Any) -> None:
    name, base, user = pkg
    with registry(name, row(f"{name}.base:Child.method")) as patches:
        assert base.Child().method(1) == ("patched", ("method", 1))
        assert base.Thing().method(1) == user.Holder().method_alias(1) == ("method", 1)
        assert patches.verify() == []
    assert "method" not in vars(base.Child)


def test_inherited_classmethod_and_static(pkg: Any) -> None:
    name, base, _ = pkg
    rows = (row(f"{name}.base:Child.make", "a"), row(f"{name}.base:Child.static", "b"))
    with registry(name, *rows):
        assert base.Child.make(1) == ("patched", ("Child", 1))
        assert base.Child.static(1) == ("patched", ("static", 1))
        assert base.Thing.make(1) == ("Thing", 1)
    assert {"make", "static"}.isdisjoint(vars(base.Child))


def test_base_then_child_stack(pkg: Any) -> None:
    name, base, _ = pkg
    before = identity_snapshot(name)
    rows = (
        row(f"{name}.base:Thing.method", "base"),
        row(f"{name}.base:Child.method", "child", replacement=other),
    )
    with registry(name, *rows):
        assert base.Child().method(1) == ("other", ("patched", ("method", 1)))
    assert diff_snapshots(before, identity_snapshot(name)) == []


def test_two_rows_on_one_target_stack_in_order(pkg: Any) -> None:
    name, base, user = pkg
    before = identity_snapshot(name)
    rows = (
        row(f"{name}.base:twice", "first"),
        row(f"{name}.user:g", "second", replacement=other),
    )
    with registry(name, *rows) as patches:
        assert base.twice(2) == user.g(2) == ("other", ("patched", 4))
        assert patches.verify() == []
        user.late = base.twice
    assert user.late(2) == 4
    del user.late
    assert diff_snapshots(before, identity_snapshot(name)) == []


def test_replace_a_function_a_method_and_a_class(pkg: Any) -> None:
    name, base, user = pkg
    original = base.Thing

    class Better(original):  # type: ignore[misc, valid-type]
        pass

    rows = (
        row(f"{name}.base:twice", "f", kind="replace", replacement=lambda x, times=2: "new"),
        row(f"{name}.base:Thing.static", "s", kind="replace", replacement=lambda x: ("ours", x)),
        row(f"{name}.base:Thing", "c", kind="replace", replacement=Better),
    )
    with registry(name, *rows) as patches:
        assert base.twice(1) == user.g(1) == "new"
        assert base.Thing is user.T is Better
        assert original.static(1) == original().static(1) == ("ours", 1)
        assert patches.verify() == []
    assert base.Thing is user.T is original
    assert original.static(1) == ("static", 1)


def test_lazy_replacement_and_constant(pkg: Any, make_package: Any) -> None:
    name, base, _ = pkg
    plugin = make_package(mod="ON = True\ndef new(original, x): return 'lazy', original(x)\n")
    rows = (
        row(f"{name}.base:twice", "f", replacement=f"{plugin}.mod:new"),
        row(f"{name}.base:FLAG", "c", kind="replace", replacement=f"{plugin}.mod:ON"),
    )
    patches = registry(name, *rows)
    assert f"{plugin}.mod" not in sys.modules
    with patches:
        assert base.twice(1) == ("lazy", 2)
        assert base.FLAG is True
        assert len(patches.sites) == 5  # the constant at its own name only
    assert base.FLAG is False


def test_replacement_keeps_its_own_names_on_undo(pkg: Any, make_package: Any) -> None:
    name, base, _ = pkg
    plugin = make_package(mod="def new(x): return 'new'\n")
    mod = importlib.import_module(f"{plugin}.mod")
    target = row(
        f"{name}.base:twice", kind="replace", replacement=f"{plugin}.mod:new", scope="everywhere"
    )
    with registry(name, target):
        mod.also = mod.new
        base.late = base.twice
    assert mod.new(1) == mod.also(1) == "new"
    assert base.late is base.twice


def test_only_the_named_attribute_of_foreign_objects(make_package: Any) -> None:
    name = make_package(base="from os.path import join\n", user="from os.path import join\n")
    base = importlib.import_module(f"{name}.base")
    user = importlib.import_module(f"{name}.user")
    join = base.join
    with registry(name, row(f"{name}.base:join")) as patches:
        assert base.join("a") == ("patched", "a")
        assert user.join is join
        assert patches.verify() == []
    assert base.join is join


def test_scope_target(pkg: Any) -> None:
    name, base, user = pkg
    with registry(name, row(f"{name}.base:twice", scope="target")):
        assert base.twice(2) == ("patched", 4)
        assert user.g(2) == 4


def test_module_getattr_is_shadowed_and_deleted_again(make_package: Any) -> None:
    name = make_package(
        impl="def f(): return 1\n",
        lazy="""
        def __getattr__(name):
            if name == "f":
                from PKG.impl import f
                return f
            raise AttributeError(name)
        """,
    )
    lazy = importlib.import_module(f"{name}.lazy")
    with registry(name, row(f"{name}.lazy:f")):
        assert lazy.f() == ("patched", 1)
        assert importlib.import_module(f"{name}.impl").f() == ("patched", 1)
    assert "f" not in vars(lazy)
    assert lazy.f() == 1


def test_callable_object_in_a_class_is_not_bound(make_package: Any) -> None:
    name = make_package(
        base="""
        class Call:
            def __call__(self, *args):
                return args
        class Box:
            hook = Call()
        """
    )
    base = importlib.import_module(f"{name}.base")
    hook = base.Box.hook
    with registry(name, row(f"{name}.base:Box.hook", scope="everywhere")):
        assert base.Box().hook(1) == ("patched", (1,))
    assert base.Box.hook is hook


def test_metaclass_hooks_are_bypassed(make_package: Any) -> None:
    name = make_package(
        base="""
        class Strict(type):
            def __setattr__(cls, name, value):
                raise TypeError("closed")
        class Box(metaclass=Strict):
            def f(self):
                return 1
        """
    )
    base = importlib.import_module(f"{name}.base")
    with registry(name, row(f"{name}.base:Box.f")):
        assert base.Box().f() == ("patched", 1)
    assert base.Box().f() == 1


def test_classes_in_functions_and_nested_classes_are_found(make_package: Any) -> None:
    name = make_package(
        base="""
        def f(): return 1
        def make():
            class Local:
                call = staticmethod(f)
            return Local
        class Outer:
            class Inner:
                call = staticmethod(f)
        """
    )
    base = importlib.import_module(f"{name}.base")
    local = base.make()
    with registry(name, row(f"{name}.base:f")):
        assert local.call() == base.Outer.Inner.call() == ("patched", 1)
    assert local.call() == base.Outer.Inner.call() == 1


def test_main_script_is_rebound(pkg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, base, _ = pkg
    script = types.ModuleType("__main__")
    script.run = base.twice  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", script)
    with registry(name, row(f"{name}.base:twice")):
        assert script.run(2) == ("patched", 4)
    assert script.run is base.twice


def test_excluded_packages_keep_the_original(pkg: Any, make_package: Any) -> None:
    name, base, _ = pkg
    plugin = make_package(mod=f"from {name}.base import twice\n")
    mod = importlib.import_module(f"{plugin}.mod")
    original = base.twice
    with Registry(name, "1.0", [row(f"{name}.base:twice")], exclude=(plugin,)) as patches:
        assert mod.twice is original
        assert patches.verify() == []


def test_apply_is_not_counted(pkg: Any) -> None:
    name, base, _ = pkg
    original = base.twice
    patches = registry(name, row(f"{name}.base:twice"))
    first = patches.apply().sites
    assert patches.apply().sites == first
    assert base.twice(2) == ("patched", 4)
    patches.undo()
    assert base.twice is original
    assert not patches.applied
    patches.undo()
    assert patches.apply().applied
    patches.undo()
    assert base.twice is original


# ---- imports in between, other wrappers ---------------------------------------------------------


def test_module_imported_after_apply_is_patched_and_restored(pkg: Any, tmp_path: Any) -> None:
    name, base, _ = pkg
    (tmp_path / name / "late.py").write_text(f"from {name}.base import twice as t, Thing\n")
    original = base.twice
    rows = (row(f"{name}.base:twice", "a"), row(f"{name}.base:Thing.method", "b"))
    with registry(name, *rows) as patches:
        late = importlib.import_module(f"{name}.late")
        late.bound = late.Thing().method
        assert late.t(2) == ("patched", 4)
        assert patches.verify() == []
    assert late.t is original
    assert late.bound(1) == ("method", 1)


def test_verify_finds_a_stale_alias_and_an_overwritten_target(pkg: Any) -> None:
    name, base, user = pkg
    original = base.twice
    patches = registry(name, row(f"{name}.base:twice")).apply()
    user.again = original
    user.wrapped = functools.partial(original)
    assert {s.site for s in patches.verify()} == {f"{name}.user:again", f"{name}.user:wrapped"}
    del user.again, user.wrapped
    ours, base.twice = base.twice, lambda x: x
    (stale,) = patches.verify()
    assert stale.site == f"{name}.base:twice"
    assert "overwritten" in stale.why
    base.twice = ours
    patches.undo()


def test_verify_before_apply(pkg: Any) -> None:
    assert registry(pkg[0], row(f"{pkg[0]}.base:twice")).verify()[0].why.endswith("not applied")


def test_wrapper_above_ours_blocks_undo_and_is_fine_for_verify(pkg: Any) -> None:
    name, base, user = pkg
    original = base.twice
    patches = registry(name, row(f"{name}.base:twice")).apply()
    ours = base.twice

    @functools.wraps(ours)
    def theirs(*args: Any) -> Any:
        return "theirs", ours(*args)

    base.twice = theirs
    assert patches.verify() == []
    with pytest.raises(PatchError, match=rf"{name}\.base:twice.*Nothing was changed"):
        patches.undo()
    assert base.twice is theirs
    assert user.g is ours
    assert patches.applied
    base.twice = ours
    patches.undo()
    assert base.twice is user.g is original


def test_site_already_restored_by_hand_does_not_block_undo(pkg: Any) -> None:
    name, base, user = pkg
    original = base.twice
    patches = registry(name, row(f"{name}.base:twice")).apply()
    user.g = original
    patches.undo()
    assert user.g is base.twice is original


def test_reloaded_module_blocks_undo(pkg: Any) -> None:
    name, base, _ = pkg
    patches = registry(name, row(f"{name}.base:twice")).apply()
    importlib.reload(base)
    assert [s.site for s in patches.verify()] == [f"{name}.base:twice"]
    with pytest.raises(PatchError, match="somebody else"):
        patches.undo()


def test_foreign_wrapper_below_ours(pkg: Any) -> None:
    name, base, user = pkg
    raw = base.twice

    @functools.wraps(raw)
    def theirs(*args: Any) -> Any:
        return "theirs", raw(*args)

    base.twice = theirs  # the aliases in user still hold the raw function
    with registry(name, row(f"{name}.base:twice")) as patches:
        assert base.twice(2) == ("patched", ("theirs", 4))
        stale = {s.site for s in patches.verify()}
        assert f"{name}.user:g" in stale
        assert all("foreign wrapper" in s.why for s in patches.verify())
    assert base.twice is theirs
    assert user.g is raw


def test_inner_function_with_its_own_name_is_not_stale(make_package: Any) -> None:
    name = make_package(
        base="""
        import functools
        def _f(): return 1
        @functools.wraps(_f)
        def outer(): return _f()
        f = outer
        del outer
        """
    )
    importlib.import_module(f"{name}.base")
    with registry(name, row(f"{name}.base:f")) as patches:
        assert patches.verify() == []


def test_registries_are_undone_last_in_first_out(pkg: Any) -> None:
    name, base, _ = pkg
    before = identity_snapshot(name)
    below = registry(name, row(f"{name}.base:twice")).apply()
    above = registry(name, row(f"{name}.base:twice", "above", replacement=other)).apply()
    assert base.twice(2) == ("other", ("patched", 4))
    with pytest.raises(PatchError):
        below.undo()
    assert base.twice(2) == ("other", ("patched", 4))
    above.undo()
    below.undo()
    assert diff_snapshots(before, identity_snapshot(name)) == []


@pytest.mark.parametrize("kind", ["wrap", "replace"])
def test_same_row_by_another_registry_is_refused(pkg: Any, kind: Any) -> None:
    name, base, _ = pkg
    rows = (row(f"{name}.base:Thing.static", "fine"), row(f"{name}.base:twice", kind=kind))
    with registry(name, rows[1]):
        applied = base.twice
        with pytest.raises(PatchError, match=rf"already applied the patches row \({name}"):
            registry(name, *rows).apply()
        assert base.twice is applied
        assert base.Thing.static(1) == ("static", 1)


# ---- all or nothing -----------------------------------------------------------------------------


def test_any_mismatch_changes_nothing_and_names_everything(pkg: Any) -> None:
    name, _, _ = pkg
    before = identity_snapshot(name)
    rows = (
        row(f"{name}.base:twice", "fine"),
        row(f"{name}.base:gone", "gone", versions=">=0.17,<0.20"),
        row(f"{name}.base:Thing.gone", "gone-method"),
        row(f"{name}.base:Nothing.f", "gone-class"),
        row(f"{name}.nowhere:f", "gone-module"),
        row(f"{name}.base:Thing.method", "moved", signature=(Expected(("x", "y")),)),
    )
    patches = registry(name, *rows, version="0.18.2")
    assert [s.status for s in patches.check()] == [Status.OK, *[Status.MISSING] * 4, Status.CHANGED]
    with pytest.raises(PatchError) as error:
        patches.apply()
    text = str(error.value)
    for part in ("gone-method", f"{name}.base:gone", "Tested with >=0.17,<0.20", "0.18.2", "5 of"):
        assert part in text
    assert "expected at least (x, y), found (x)" in text
    assert "fine" not in text
    assert not patches.applied
    assert diff_snapshots(before, identity_snapshot(name)) == []


def test_failure_half_way_is_rolled_back(pkg: Any) -> None:
    name, base, _ = pkg
    before = identity_snapshot(name)

    rows = (
        row(f"{name}.base:twice", "a"),
        row(f"{name}.base:Child.method", "b"),
        row(f"{name}.base:Thing.size", "c"),
    )
    patches = registry(name, *rows)
    bind, calls = patches._bind, iter(range(100))

    def failing(site: Any, value: object) -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt
        bind(site, value)

    patches._bind = failing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        patches.apply()
    assert not patches.applied
    assert diff_snapshots(before, identity_snapshot(name)) == []
    assert "method" not in vars(base.Child)


def test_replacement_that_cannot_be_loaded(pkg: Any) -> None:
    name, base, _ = pkg
    original = base.twice
    with pytest.raises(PatchError, match=r"cannot be loaded.*Nothing was changed"):
        registry(name, row(f"{name}.base:twice", replacement="no.such:thing")).apply()
    assert base.twice is original


def test_module_that_fails_at_import_is_missing(make_package: Any) -> None:
    name = make_package(broken="raise RuntimeError('needs a GPU')\n")
    (status,) = registry(name, row(f"{name}.broken:f")).check()
    assert status.status is Status.MISSING
    assert "needs a GPU" in status.detail


@pytest.mark.parametrize(
    ("signature", "detail"),
    [
        ((Expected(("x",)),), ""),
        ((Expected(("x", "times"), exact=True),), ""),
        ((Expected(("x",), exact=True),), "expected exactly (x), found (x, times)"),
        ((Expected(("times", "x"), exact=True),), "found (x, times)"),
        ((Expected(("y",), "<1"), Expected(("x",), ">=1")), ""),
        ((Expected(("x",), "<1"),), "no expected signature for version 1.0"),
    ],
)
def test_signatures(pkg: Any, signature: Any, detail: str) -> None:
    (status,) = registry(pkg[0], row(f"{pkg[0]}.base:twice", signature=signature)).check()
    assert (status.status is Status.OK) == (not detail)
    assert detail in status.detail


def test_class_signature_and_method_self(make_package: Any) -> None:
    name = make_package(
        base="class A:\n    def __init__(self, a, b): pass\n    def f(self, x): pass\n"
    )
    rows = (
        row(
            f"{name}.base:A",
            "a",
            kind="replace",
            replacement=int,
            signature=(Expected(("a", "b"), exact=True),),
        ),
        row(f"{name}.base:A.f", "f", signature=(Expected(("self", "x"), exact=True),)),
    )
    assert [s.status for s in registry(name, *rows).check()] == [Status.OK, Status.OK]


def test_versions(pkg: Any) -> None:
    name, base, _ = pkg
    rows = (
        row(f"{name}.base:gone", "old", versions="<0.18", optional=True),
        row(f"{name}.base:twice", "new", versions=">=0.18,<0.20"),
    )
    patches = registry(name, *rows, version="0.19.1")
    assert [s.status.value for s in patches.check()] == ["not needed", "ok"]
    with patches:
        assert base.twice(1) == ("patched", 2)
    untested = registry(name, *rows, version="0.20.0rc1")
    assert [s.status.value for s in untested.check()] == ["not needed", "untested"]
    with pytest.raises(PatchError, match=r"untested: version 0\.20\.0rc1 is outside"):
        untested.apply()


def test_wrapping_a_class_or_a_constant_is_refused(pkg: Any) -> None:
    name = pkg[0]
    rows = (row(f"{name}.base:Thing", "class"), row(f"{name}.base:FLAG", "constant"))
    found = registry(name, *rows).check()
    assert [s.status for s in found] == [Status.CHANGED, Status.CHANGED]
    assert "can be replaced, but not wrapped" in found[0].detail
    assert "bool" in found[1].detail


@pytest.mark.parametrize("target", ["module.only", "a:b.c.d", ":x", "a:"])
def test_malformed_target(target: str) -> None:
    with pytest.raises(ValueError, match="is not 'package"):
        row(target)


def test_malformed_rows() -> None:
    with pytest.raises(ValueError, match="kind"):
        row("a:b", kind="around")
    with pytest.raises(ValueError, match="is not 'module:attr'"):
        row("a:b", replacement="a.b")
    with pytest.raises(ValueError, match="used twice: row"):
        Registry("a", "1", [row("a:b"), row("a:c")])


# ---- snapshots ----------------------------------------------------------------------------------


def test_snapshots_see_every_kind_of_change(pkg: Any) -> None:
    name, base, _ = pkg
    before = identity_snapshot(name)
    assert diff_snapshots(before, identity_snapshot(name)) == []
    base.extra = 1
    del base.FLAG
    base.Thing.method = lambda self: None
    base.twice.__code__ = (lambda x: x).__code__
    changes = {
        (d.name.partition(":")[2], d.change)
        for d in diff_snapshots(before, identity_snapshot(name))
    }
    assert {
        ("extra", "added"),
        ("FLAG", "removed"),
        ("Thing.method", "changed"),
        ("twice.__code__", "changed"),
    } <= changes


def test_importing_more_is_no_difference(pkg: Any, tmp_path: Any) -> None:
    name, _, _ = pkg
    (tmp_path / name / "more.py").write_text("def f(): pass\n")
    before = identity_snapshot(name)
    importlib.import_module(f"{name}.more")
    after = identity_snapshot(name)
    assert diff_snapshots(before, after) == []
    assert (f"{name}.more:f", "added") in diff_snapshots(before, after, new_modules=True)
