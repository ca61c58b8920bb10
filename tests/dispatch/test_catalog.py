"""Plugins: found at first use, contained when they fail, never ranked by load order."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
import types
import weakref
from importlib import metadata

import pytest
import torch
from ran import install_plugin, printed

import registry
from registry import DuplicateVariant, Requires, Variant, hookimpl, notices
from registry.dispatch import catalog as catalogs
from registry.dispatch import discovery
from registry.dispatch.decision import candidate_data

pytestmark = pytest.mark.usefixtures("quick_python")


def plugin_module(name, **hooks):
    module = types.ModuleType(name)
    for hook, function in hooks.items():
        function.__name__ = hook
        setattr(module, hook, hookimpl(function))
    return module


def variant(name, op="attention"):
    return Variant(name, op=op, run=lambda *a, **k: None, requires=Requires(arch=("cpu",)))


@pytest.fixture
def discover_with(monkeypatch):
    """Run discovery over one built-in and then made-up plugins."""

    def run(**plugins):
        builtin = [loader for loader in discovery._loaders() if loader[0] == "registry.plugins.torch_attention"]

        def loader(value):
            def load():
                if isinstance(value, Exception):
                    raise value
                return value

            return load

        extra = [(name, loader(value)) for name, value in plugins.items()]
        monkeypatch.setattr(discovery, "_loaders", lambda: [*builtin, *extra])
        return discovery.discover()

    return run


def test_built_ins_are_found_without_failures():
    found = discovery.discover()
    assert {"torch_math", "torch_cpu", "torch_flash", "torch_cudnn", "torch_efficient", "torch_matmul"} <= set(
        found.variants
    )
    assert found.failures == ()


def test_a_third_party_plugin_is_found(discover_with):
    found = discover_with(acme=plugin_module("acme", registry_variants=lambda: [variant("acme.flash")]))
    assert found.variants["acme.flash"].origin == "acme"


@pytest.mark.parametrize("error", [ImportError("no libacme.so"), SyntaxError("bad"), RuntimeError("boom")])
def test_a_plugin_that_fails_to_load_is_contained_and_shown(discover_with, error):
    good = plugin_module("good", registry_variants=lambda: [variant("good.flash")])
    found = discover_with(bad=error, good=good)
    assert "good.flash" in found.variants and "torch_math" in found.variants
    (failure,) = found.failures
    assert failure.plugin == "bad" and f"{type(error).__name__}: {error}" in failure.error


def test_two_variants_of_one_name_are_an_error_that_names_both(discover_with):
    one = plugin_module("one", registry_variants=lambda: [variant("acme.flash"), variant("one.other")])
    two = plugin_module("two", registry_variants=lambda: [variant("acme.flash"), variant("two.other")])
    found = discover_with(one=one, two=two)
    assert found.variants["acme.flash"].origin == "one"
    assert "two.other" not in found.variants  # nothing of the offending plugin is used
    assert "one" in found.failures[0].error and "two" in found.failures[0].error


def test_register_refuses_a_taken_name(declare):
    declare("test.taken")
    with pytest.raises(DuplicateVariant, match=r"registry\.register; replace=True puts this one in its place"):
        registry.register(variant("test.taken"))
    with pytest.raises(DuplicateVariant, match="torch_attention"):
        registry.register(variant("torch_math"))


def test_register_can_redefine_ones_own(declare):
    declare("test.mine")
    again = registry.register(variant("test.mine"), replace=True)
    assert registry.variants()["test.mine"].run is again.run


def test_variants_of_ever_new_names_are_let_go_of(declare):
    """As in a notebook of many hours: of all but the last nothing is left."""
    held = []
    for number in range(4):
        name = f"test.new{number}"
        declare(name)
        with registry.use(name):
            registry.attention(*[torch.ones(1, 1, 4, 8)] * 3)
        held.append(weakref.ref(registry.variants()[name]))
        registry.unregister(name)
        registry.forget_plans()
    gc.collect()
    assert [one() for one in held[:-1]] == [None] * 3


def test_register_refuses_an_unknown_op():
    with pytest.raises(registry.UnknownOp, match="attention"):
        registry.register(variant("test.odd", op="convolution"))


def test_entry_points_are_read(monkeypatch):
    module = plugin_module("acme_kernels", registry_variants=lambda: [variant("acme.entry")])
    monkeypatch.setitem(sys.modules, "acme_kernels", module)
    point = metadata.EntryPoint("acme", "acme_kernels", discovery.ENTRY_POINT_GROUP)
    real = metadata.entry_points
    monkeypatch.setattr(
        metadata, "entry_points", lambda **k: [point] if k.get("group") == discovery.ENTRY_POINT_GROUP else real(**k)
    )
    found = discovery.discover()
    assert found.variants["acme.entry"].origin == "acme (acme_kernels)"


# --- plugins that misbehave ---------------------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raising(error):
    def hook():
        raise error

    return hook


def test_who_failed_is_said_with_the_authors_own_line(discover_with):
    def hook():
        return [Variant("bad.one", op="matmul", run=print, requires=Requires(arch=("hopper",)))]

    line = hook.__code__.co_firstlineno + 1
    (failure,) = discover_with(bad=plugin_module("bad", registry_variants=hook)).failures
    assert failure.error.startswith("DeclarationError: Requires.arch: got 'hopper'; allowed: ")
    assert failure.error.endswith(f" (test_catalog.py:{line}, in hook)")


@pytest.mark.parametrize("hook", ["registry_variants", "registry_tables", "registry_commands"])
def test_a_hook_without_its_mark_is_named_beside_one_that_has_it(discover_with, hook):
    others = {"registry_variants": list, "registry_tables": list, "registry_commands": lambda cli: None}
    del others[hook]
    plugin = plugin_module("bad", **{name: lambda *a, of=of: of(*a) for name, of in others.items()})
    setattr(plugin, hook, lambda: [variant("bad.one")])
    (failure,) = discover_with(bad=plugin).failures
    assert f"{hook}: got a function without a mark; allowed: one with @registry.hookimpl" in failure.error


@pytest.mark.parametrize("error", [KeyError("oops"), SystemExit(3), Unspeakable(), GeneratorExit()])
def test_whatever_a_hook_raises_is_contained(discover_with, error):
    good = plugin_module("good", registry_variants=lambda: [variant("good.flash")])
    found = discover_with(bad=plugin_module("bad", registry_variants=raising(error)), good=good)
    assert "good.flash" in found.variants
    assert [failure.plugin for failure in found.failures] == ["bad"]
    assert type(error).__name__ in found.failures[0].error


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({}, "no hook"),
        (
            {"registry_variant": lambda: [variant("bad.one")]},
            "allowed: registry_commands, registry_tables, registry_variants",
        ),
        ({"registry_variants": lambda: ["flash"]}, "got str; allowed: a Variant"),
        ({"registry_variants": lambda: None}, "registry_variants: got None; allowed: a list"),
        ({"registry_tables": lambda: None}, "registry_tables: got None; allowed: a list"),
        ({"registry_tables": lambda: "/etc/tables"}, "registry_tables: got str; allowed: a list"),
        ({"registry_tables": lambda: [7]}, "registry_tables: got int in its list"),
        ({"registry_tables": lambda: [""]}, "registry_tables: got ''; allowed: whole paths"),
        ({"registry_tables": lambda: ["tables"]}, "registry_tables: got 'tables'; allowed: whole paths"),
        ({"registry_variants": lambda: variant("bad.one")}, "registry_variants: got Variant; allowed: a list"),
        ({"registry_variants": lambda: 3}, "registry_variants: got int; allowed: a list"),
        ({"registry_variants": lambda: {"one": variant("bad.one")}}, "registry_variants: got dict; allowed: a list"),
        ({"registry_variants": lambda: [variant("bad.one", op="convolution")]}, "op: got 'convolution'; allowed: att"),
        (
            {"registry_variants": lambda: [Variant("bad.one", "matmul", print, Requires(dtypes=("float17",)))]},
            "Variant bad.one: Requires.dtypes: got 'float17'",
        ),
    ],
)
def test_hooks_that_are_none_and_answers_that_are_none_are_named(discover_with, hooks, said):
    found = discover_with(bad=plugin_module("bad", **hooks))
    (failure,) = found.failures
    assert failure.plugin == "bad" and said in failure.error
    assert "bad.one" not in found.variants and "bad" not in found.plugins and not found.tables


def test_prints_of_plugins_go_to_stderr(discover_with, capsys):
    def chatty():
        print("hello from a hook")
        return [variant("bad.chatty")]

    assert "bad.chatty" in discover_with(bad=plugin_module("bad", registry_variants=chatty)).variants
    out, err = capsys.readouterr()
    assert out == "" and "hello from a hook" in err


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(3), Unspeakable()])
def test_a_rule_that_raises_makes_its_own_variant_illegal(declare, error):
    def rule(problem, config):
        raise error

    declare("test.rule", rule=rule, arch=("cpu",))
    decision = registry.attention.explain(*[torch.zeros(1, 1, 4, 8)] * 3)
    (refused,) = [c for c in decision.candidates if c.variant == "test.rule"]
    (reason,) = refused.reasons
    assert reason.code == "declaration" and type(error).__name__ in reason.got
    assert decision.variant == "torch_cpu"
    assert any("test.rule" in message for message in notices.counts())


def bad_answers():
    """Each part of a declaration with answers that are none, or that come too late."""

    def ends(*args):
        raise SystemExit(3)

    def second(problem, config):
        return ends() if config["B"] == 2 else []

    yield from (({part: ends}, False) for part in ("rule", "shared_memory", "registers", "configs"))
    for answer in (None, [1], [None], [{"B": [1]}], "text", [{"B": torch.ones(1)}]):
        yield {"configs": lambda problem, answer=answer: answer}, False
    for answer in (None, 7, ["text"], [None]):
        yield {"rule": lambda problem, config, answer=answer: answer}, False
    yield {"shared_memory": lambda problem, config: "many"}, False
    yield {"configs": [{"B": 1}, {"B": 2}], "rule": second}, True


@pytest.mark.parametrize(("parts", "legal"), list(bad_answers()))
def test_answers_of_a_declaration_that_are_none_concern_its_own_variant(declare, parts, legal):
    """In first place, asked by name, and asked why not; what is explained is what runs."""
    declare("test.bad", **parts)
    q = torch.randn(1, 1, 4, 8)
    for preferred in (["test.bad"], []):
        with registry.prefer(preferred):
            decision = registry.attention.explain(q, q, q)
            assert (decision.variant == "test.bad") <= legal
            text = str(decision), str(decision.to_dict())
            registry.attention(q, q, q)
    if not legal:
        assert "illegal test.bad" in text[0]
        for forced in ({}, {"config": {"B": 1}}):
            with registry.use("test.bad", **forced), pytest.raises(registry.IllegalVariant):
                registry.attention(q, q, q)


def test_a_reason_that_cannot_be_shown_is_told_so(declare):
    declare("test.bad", rule=lambda problem, config: [registry.Reason("x", "x", Unspeakable(), [Unspeakable()])])
    q = torch.randn(1, 1, 4, 8)
    with registry.prefer(["test.bad"]):
        assert "cannot be shown" in str(registry.attention.explain(q, q, q))


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(3), Unspeakable()])
def test_one_that_cannot_say_whether_it_waits_may_wait(declare, error):
    def waits(problem):
        raise error

    made = declare("test.waits", waits=waits)
    q = torch.randn(1, 1, 4, 8)
    registry.attention(q, q, q, variant="test.waits")
    assert made.may_wait(registry.attention.explain(q, q, q).problem)
    assert any("test.waits failed" in message for message in notices.counts())


class Ending:
    def __str__(self):
        raise SystemExit(3)


@pytest.mark.parametrize(
    "said", ["x" * 10**6, "one\ntwo\r\x1b[31mthree", "many\n" * 10**5, Ending()], ids=["long", "odd", "lines", "none"]
)
@pytest.mark.parametrize("part", ["rule", "shared_memory", "registers", "configs", "reason"])
def test_what_a_declaration_says_is_short_and_printable(declare, part, said):
    """In errors, in what is explained and in notices: of what it raises, and of its own reasons."""

    def fails(*args):
        raise ValueError(said)

    def refuses(problem, config):
        return [registry.Reason(said, said, said, said, said, said)]

    declare("test.bad", **({"rule": refuses} if part == "reason" else {part: fails}))
    q = torch.randn(1, 1, 4, 8)
    with registry.use("test.bad"), pytest.raises(registry.IllegalVariant) as caught:
        registry.attention(q, q, q)
    (refused,) = [c for c in registry.attention.explain(q, q, q).candidates if c.variant == "test.bad"]
    _, line = str(caught.value).splitlines()
    noticed = [text for text in notices.counts() if "test.bad" in text]
    texts = [line, str(refused.reasons[0]), *filter(None, candidate_data(refused)["reasons"][0].values()), *noticed]
    assert all(text.isprintable() and len(text) < (6000 if part == "reason" else 2000) for text in texts)


def test_only_what_was_registered_can_be_taken_back(declare):
    with pytest.raises(registry.DeclarationError, match=r"'torch_cpu', which registry\.plugins\.\S+ declares"):
        registry.unregister("torch_cpu")
    assert "torch_cpu" in registry.variants()
    declare("test.mine")
    registry.unregister("test.mine")
    registry.unregister("test.mine")  # gone already
    assert "test.mine" not in registry.variants()
    registry.unregister(declare("test.mine"))
    assert "test.mine" not in registry.variants()
    for wrong in (None, ["test.mine"]):
        with pytest.raises(registry.InvalidArgument, match=r"variant: got .*; allowed: a Variant that was registered"):
            registry.unregister(wrong)


def test_what_cannot_be_right_is_refused_in_the_body_of_a_module_too(tmp_path, monkeypatch):
    claims = "registry.Requires(arch=('cpu',), dtypes=('float33',))"
    body = f"import registry\nregistry.register(registry.Variant('me.mine', 'matmul', lambda a, b: a, {claims}))\n"
    (tmp_path / "mine.py").write_text(body)
    monkeypatch.setattr(catalogs.catalog, "_catalog", None)  # as in a process that has called nothing yet
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(registry.DeclarationError, match=r"Requires\.dtypes: got 'float33'"):
        importlib.import_module("mine")
    assert not catalogs.catalog._waiting


@pytest.mark.parametrize("op", [["attention"], {}, None, 5])
def test_an_op_that_is_no_name_is_refused(op):
    with pytest.raises(registry.DeclarationError, match=r"Variant me\.mine: op: got .*; allowed: the name of an op"):
        registry.Variant("me.mine", op, lambda: None, registry.Requires(arch=("cpu",)))


DECLARE = """
import registry
from registry import Requires, Variant, hookimpl
def made(name):
    return Variant(name, "attention", lambda *a, **k: None, Requires(arch=("cpu",)))
"""
REGISTERS = DECLARE + "registry.register(made('acme.early'))\n"
IN_A_HOOK = DECLARE + "@hookimpl\ndef registry_variants():\n    registry.register(made('acme.early'))\n    return []\n"
THEN_FAILS = REGISTERS + "raise SystemExit(4)\n"
CALLS = """
import torch, registry
x = torch.ones(1, 1, 4, 8)
registry.attention(x, x, x)
"""
HOST = """
import json, sys, torch, registry
{first}
x = torch.ones(1, 1, 4, 8)
registry.attention(x, x, x)
from registry.dispatch.catalog import catalog
print(json.dumps(["acme.early" in registry.variants(), [f.error for f in catalog.get().failures]]))
"""


def hosted(tmp_path, body, first=""):
    """What a process makes of an installed plugin of that body: whether its variant is there, and what failed."""
    install_plugin(tmp_path, "acme_kernels", body)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    return json.loads(printed(sys.executable, "-c", HOST.format(first=first), env=environment, timeout=100))


@pytest.mark.parametrize(
    ("body", "first", "expected"),
    [
        (REGISTERS, "", [True, []]),
        (IN_A_HOOK, "", [True, []]),
        (REGISTERS + "@hookimpl\ndef registry_variants(): return []\n", "import acme_kernels", [True, []]),
        (THEN_FAILS, "", [False, ["SystemExit: 4 (acme_kernels.py:7, in <module>)"]]),
    ],
    ids=["while it is imported", "in its hook", "before, by the host", "and then fails"],
)
def test_a_plugin_may_register_itself_and_takes_it_along_where_it_fails(tmp_path, body, first, expected):
    assert hosted(tmp_path, body, first) == expected


def test_calling_an_op_while_plugins_are_loaded_is_an_error_of_that_plugin(tmp_path):
    early, (error,) = hosted(tmp_path, CALLS)
    assert not early and "while plugins are being loaded" in error


def test_an_import_that_waits_for_the_plugins_is_not_waited_for(monkeypatch):
    """One thread loads plugins, and needs an import that another is in the midst of, which asks for the plugins."""
    lazy, in_import = catalogs._Lazy(), threading.Event()
    import_lock = threading.Lock()
    monkeypatch.setattr(catalogs, "WAIT_S", 0.2)

    def discover(registered):
        in_import.wait(10)
        with import_lock:
            return discovery.Catalog()

    monkeypatch.setattr(catalogs, "discover", discover)
    finder = threading.Thread(target=lazy.get)
    with import_lock:
        finder.start()
        in_import.set()
        lazy.register(variant("test.waiting"), "here")
        with pytest.raises(registry.RegistryError, match="another thread"):
            lazy.get()
    finder.join(10)
    assert not finder.is_alive() and "test.waiting" in lazy.get().variants
