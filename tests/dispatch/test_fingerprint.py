"""A fingerprint follows what a kernel does, not how its file is laid out."""

from __future__ import annotations

import hashlib

import pytest

from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import _code_of, fingerprint_of

SOURCE = b"""
from registry.kernels import tile

def run(a, b, *, config):
    '''Adds.'''
    return tile(a, b, config["BLOCK"])  # one block
"""


@pytest.mark.parametrize(
    "same",
    [
        SOURCE.replace(b"registry.kernels", b"registry.toolbox.kernels"),
        SOURCE.replace(b"from registry.kernels import tile", b"import os\nfrom registry.kernels import other, tile"),
        SOURCE.replace(b"'''Adds.'''\n    ", b""),
        SOURCE.replace(b"  # one block", b""),
        SOURCE.replace(b"    return", b'    scopes.enter("tile")\n    return'),
        SOURCE.replace(b"(a, b, config[", b"(\n        a,\n        b,\n        config[").replace(b"])", b"],\n    )"),
    ],
)
def test_imports_comments_and_layout_do_not_count(same):
    assert same != SOURCE and _code_of(same) == _code_of(SOURCE)


@pytest.mark.parametrize(
    "other",
    [
        SOURCE.replace(b"BLOCK", b"TILE"),
        SOURCE.replace(b"a, b, config", b"b, a, config"),
        SOURCE.replace(b"    return", b'    other.enter("tile")\n    return'),
        SOURCE.replace(b"    return", b"    if a:\n        return"),
        SOURCE.replace(b"import tile\n", b"import tile; SIZE = 4\n"),
    ],
)
def test_code_counts(other):
    assert _code_of(other) != _code_of(SOURCE)


def test_what_a_kernel_shares_with_others_is_not_in_its_fingerprint():
    """`run` of a kernel on a `Call` record is made by the toolbox, whose changes must not make measurements stale."""
    named = catalog.get().variants
    assert fingerprint_of(named["triton_matmul"]) != fingerprint_of(named["gluon_matmul_ws"])
    assert not any("toolbox" in str(path) for path in _files_of(named["triton_matmul"]))


def _files_of(variant):
    from registry.dispatch.fingerprint import _files

    return _files(variant.origin, variant.run.__module__ if hasattr(variant.run, "__module__") else "")


def test_every_python_spells_strings_alike():
    """Since 3.12 an f-string is many tokens; what was measured under one Python is not stale under another."""
    source = 'def f(x):\n    return f"{x!r:>{9}} {{}}" + rf\'a{x + 1}\\n\' + f"""{x\n} b"""\n'
    assert hashlib.sha256(_code_of(source.encode())).hexdigest()[:12] == "0c54505f97da"
