"""Documentation that cannot rot: generated parts are current, code in it runs, links lead somewhere."""

from __future__ import annotations

import inspect
import re
import runpy
from importlib import metadata
from pathlib import Path

import pytest
import torch
from test_code_blocks import blocks

import docs
import registry
from registry import hookspecs
from registry.dispatch.catalog import catalog
from registry.dispatch.discovery import BUILTIN_PACKAGE, ENTRY_POINT_GROUP
from registry.ops.attention.problem import AttentionProblem
from registry.ops.known import all_ops
from registry.tuning.lint import lint_tables, load_files

pytestmark = pytest.mark.usefixtures("quick_python")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *(ROOT / "docs").rglob("*.md")]


def in_the_readme(language):
    return [block.code for block in blocks(ROOT / "README.md") if block.language == language]


# --- generated parts ----------------------------------------------------------------------------------------------


def test_variants_page_is_current():
    assert not catalog.get().failures, "built-in plugins must load for their declarations to be written down"
    assert (ROOT / "docs" / "variants.md").read_text(encoding="utf-8") == docs.variants_page(), "run: make docs"


def test_contracts_for_authors_are_current():
    """And whole: every argument that an op hands over is there, and said what it is where the op's folder says so."""
    page = (ROOT / "docs" / "authors.md").read_text(encoding="utf-8")
    assert page == docs.with_contracts(page), "run: make docs"
    for name, op in all_ops().items():
        section = page.split(f"### {name}\n")[1].split("\n### ")[0]
        handed = {*op.tensors, *op.fixed_arguments, *op.call_arguments}
        assert not [word for word in handed if f"| `{word}` |" not in section]
        assert op.contract is None or set(op.contract.arguments) == handed


def test_variants_page_names_every_built_in_variant_and_no_other(declare):
    declare("test.kernel")
    page = docs.variants_page()
    built_in = {name for name, variant in registry.variants().items() if variant.origin.startswith(BUILTIN_PACKAGE)}
    assert set(re.findall(r"^\| `([a-z0-9_.]+)` \|", page.split("## Known to be bad")[0], re.M)) == built_in
    for op in all_ops():
        assert f"## {op}\n" in page


@pytest.mark.skipif(bool(metadata.entry_points(group=ENTRY_POINT_GROUP)), reason="other plugins show up in the output")
def test_outputs_in_the_readme_are_real():
    assert docs.BLOCK.search(README)
    assert docs.refreshed(README) == README, "run: make docs"


def test_check_names_a_page_that_is_not_current(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("nothing generated in here\n")
    (tmp_path / "docs" / "authors.md").write_text("nothing generated in here, either\n")
    monkeypatch.chdir(tmp_path)
    assert docs.main(["--check"]) == 1
    assert "variants.md is not current" in capsys.readouterr().out
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0


# --- what is written by hand --------------------------------------------------------------------------------------


def test_a_variant_of_the_readme_is_right(takes_back):
    namespace = {}
    for block in in_the_readme("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    for variant in namespace["registry_variants"]():
        registry.register(variant)
        a, b = torch.randn(2, 3), torch.randn(3, 2)
        torch.testing.assert_close(registry.matmul(a, b, variant=variant.name), a @ b)


def test_the_table_in_the_readme_is_without_error(tmp_path):
    (block,) = in_the_readme("yaml")
    path = tmp_path / "attention.sm90.yaml"
    path.write_text(block)
    tables = load_files([path])
    assert len(tables.tables) == 1
    assert not [finding for finding in lint_tables(tables) if finding.severity == "error"]


def test_the_erratum_for_authors_forbids_what_it_says(tmp_path):
    (block,) = (block.code for block in blocks(ROOT / "docs" / "authors.md") if block.language == "yaml")
    (path := tmp_path / "errata.yaml").write_text(block)
    h100 = registry.Target.named("H100")
    tables = load_files([path])
    assert not [finding for finding in lint_tables(tables) if finding.severity == "error"]
    for keys, forbidden in ((15, True), (16, False)):
        problem = AttentionProblem.of_shape(h100, s=8, sk=keys)
        found = tables.errata_for("attention", "acme.my_kernel", problem.facts(), problem.target)
        assert bool(found) == (forbidden and h100.triton.startswith("3.6.")), keys


def test_every_hook_and_every_variable_is_in_the_readme():
    hooks = [name for name, value in vars(hookspecs).items() if inspect.isfunction(value)]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "registry").rglob("*.py"))
    variables = set(re.findall(r'"(REGISTRY_[A-Z]+(?:_[A-Z]+)*)"', source))
    assert hooks and variables
    assert not [name for name in (*hooks, *sorted(variables)) if name not in README]


LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.S | re.M)


def anchors(page: Path) -> set[str]:
    """What a link may name in a page: its headings, in the way of GitHub."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """To files that are there, and to headings that these have."""
    lost = []
    for path, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / path if path else page
        if path.startswith("https://"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(f"{path}#{anchor}" if anchor else path)
    assert not lost


def test_every_table_of_results_has_one_place_in_docs_and_a_writer():
    import plots

    in_docs = [page.read_text(encoding="utf-8") for page in PAGES if page.parent != ROOT]
    places = [name for text in in_docs for name in plots.MARKER.findall(text)]
    written = {writer.__name__ for writer in plots.WRITERS} | set(plots.SHOWN)
    assert sorted(places) == sorted(written), "two places, or none"
    assert set(plots.MARKER.findall(README)) <= written


def test_every_measured_page_is_in_the_overview():
    overview = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert not [page for page in (ROOT / "docs" / "measured").iterdir() if f"(measured/{page.name})" not in overview]


# --- examples -----------------------------------------------------------------------------------------------------


def test_the_demo_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "H100 (sm90)" in out and "attention_backward ran" in out
    assert "pad head_dim 76 to 80" in out, "the refusal comes with a fix"


def test_the_notebook_example_runs(capsys, takes_back):
    runpy.run_path(str(ROOT / "examples" / "register_in_a_notebook.py"))
    out = capsys.readouterr().out
    assert "{'matmul': {'mine.split_k': 1}}" in out and "bias: got True" in out
    assert "fallback: mine.split_k" in out


def test_the_third_party_example_is_right(takes_back):
    example = runpy.run_path(str(ROOT / "examples" / "acme" / "acme_kernels.py"))
    (variant,) = example["registry_variants"]()
    registry.register(variant)
    q, k, v = torch.randn(2, 3, 150, 32), torch.randn(2, 3, 90, 32), torch.randn(2, 3, 90, 32)
    for causal in (False, True):
        out, lse = registry.attention(q, k, v, causal=causal, return_lse=True, variant="acme.blocked")
        expected, expected_lse = registry.attention.reference(q, k, v, causal=causal, return_lse=True)
        torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)
