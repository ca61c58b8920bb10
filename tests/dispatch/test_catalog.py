"""Plugins: found at first use, contained when they fail, never ranked by load order."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib import metadata

import pytest

import registry
from registry import DuplicateVariant, Requires, Variant, hookimpl
from registry.dispatch import catalog as discovery


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
        builtin = [source for source in discovery._sources() if source[0] == "registry.plugins.torch_attention"]

        def loader(value):
            def load():
                if isinstance(value, Exception):
                    raise value
                return value

            return load

        extra = [(name, loader(value)) for name, value in plugins.items()]
        monkeypatch.setattr(discovery, "_sources", lambda: [*builtin, *extra])
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
    assert failure.plugin == "bad" and str(error) in failure.error and type(error).__name__ in failure.details


def test_a_hook_that_raises_is_contained(discover_with):
    def broken():
        raise KeyError("oops")

    found = discover_with(bad=plugin_module("bad", registry_variants=broken))
    assert [f.plugin for f in found.failures] == ["bad"]


def test_a_misspelt_hook_is_caught(discover_with):
    found = discover_with(bad=plugin_module("bad", registry_variant=lambda: [variant("bad.flash")]))
    assert "registry_variant" in found.failures[0].error
    assert "bad.flash" not in found.variants


def test_a_plugin_without_any_hook_is_caught(discover_with):
    found = discover_with(empty=types.ModuleType("empty"))
    assert "empty" in found.failures[0].plugin and "no hook" in found.failures[0].error


def test_what_is_no_variant_is_refused(discover_with):
    found = discover_with(bad=plugin_module("bad", registry_variants=lambda: ["flash"]))
    assert "str" in found.failures[0].error


def test_two_variants_of_one_name_are_an_error_that_names_both(discover_with):
    one = plugin_module("one", registry_variants=lambda: [variant("acme.flash"), variant("one.other")])
    two = plugin_module("two", registry_variants=lambda: [variant("acme.flash"), variant("two.other")])
    found = discover_with(one=one, two=two)
    assert found.variants["acme.flash"].origin == "one"
    assert "two.other" not in found.variants  # nothing of the offending plugin is used
    assert "one" in found.failures[0].error and "two" in found.failures[0].error


def test_register_refuses_a_taken_name(declare):
    declare("test.taken")
    with pytest.raises(DuplicateVariant, match=r"registry\.register"):
        registry.register(variant("test.taken"))
    with pytest.raises(DuplicateVariant, match="torch_attention"):
        registry.register(variant("torch_math"))


def test_register_can_redefine_ones_own(declare):
    declare("test.mine")
    again = registry.register(variant("test.mine"), replace=True)
    assert registry.variants()["test.mine"].run is again.run


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


def test_import_loads_no_plugin_and_no_triton():
    code = (
        "import sys, torch, registry\n"
        "assert not [m for m in sys.modules if m.startswith('registry.plugins')], 'plugins'\n"
        "assert 'triton' not in sys.modules, 'triton'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
