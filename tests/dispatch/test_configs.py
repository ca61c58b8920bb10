"""A config that comes from a table or from `use` is one that the variant declares, or it does not run."""

from __future__ import annotations

import pytest
import torch

import registry
from registry import IllegalVariant, InvalidArgument, notices
from registry.doctor import ailments, examine
from registry.tuning.lint import lint_tables, load_files

TABLE = "op: attention\narch: cpu\nrules:\n- use: [{{variant: test.tiled, config: {config}}}]\n"
BAD = ["{FOO: 1}", "{BLOCK_M: -5}", "{BLOCK_M: 0}", "{BLOCK_M: '16'}", "{BLOCK_M: true}", "{BLOCK_M: 16, X: 1}", "{}"]


@pytest.fixture
def seen(declare):
    """The configs that were launched of a variant with two, which trusts what it is given."""
    found = []

    def run(q, k, v, *, scale, config):
        found.append(dict(config))
        return q * config["BLOCK_M"], None

    declare("test.tiled", run=run, configs=[{"BLOCK_M": 16}, {"BLOCK_M": 32}], arch=("cpu",))
    return found


@pytest.fixture
def table(tmp_path, put_in_force):
    def put(config):
        (tmp_path / "mine.yaml").write_text(TABLE.format(config=config))
        put_in_force(tmp_path)

    return put


@pytest.mark.parametrize("config", BAD)
def test_a_table_cannot_launch_an_undeclared_config(config, table, seen):
    table(config)
    q = torch.randn(1, 1, 8, 16)
    decision = registry.attention.explain(q, q, q)
    assert (decision.variant, decision.config) == ("test.tiled", {"BLOCK_M": 16})
    assert "passed over" in str(decision) and "mine.yaml" in str(decision)
    (said,) = [text for text in registry.notices.counts() if "takes its own config" in text]
    assert " for attention on " in said and "('attention'" not in said
    registry.attention(q, q, q)
    assert seen == [{"BLOCK_M": 16}]
    assert any("mine.yaml" in text for text in notices.counts())


@pytest.mark.parametrize("config", BAD)
@pytest.mark.parametrize("by_problem", [False, True])
def test_lint_and_doctor_name_the_line_of_an_undeclared_config(config, by_problem, tmp_path, put_in_force, declare):
    declared = [{"BLOCK_M": 16}, {"BLOCK_M": 32}]
    declare("test.tiled", configs=(lambda problem: declared) if by_problem else declared, arch=("cpu",))
    rule = f"- when: {{head_dim: 64}}\n  use:\n  - test.tiled\n  - {{variant: test.tiled,\n     config: {config}}}\n"
    file = tmp_path / "mine.yaml"
    file.write_text(f"op: attention\narch: cpu\nrules:\n{rule}")
    (found,) = [finding for finding in lint_tables(load_files([file])) if finding.code == "unknown-config"]
    assert (found.severity, found.line, found.path) == ("error", 7, "$.rules[0].use[1]")
    if config == BAD[0]:  # doctor shows what lint finds
        put_in_force(file)
        assert any(text.startswith(f"{file}:7: ") for text in ailments(examine()))


def test_lint_asks_for_the_configs_of_the_problems_that_a_row_takes(tmp_path, declare):
    def configs(problem):
        return [{"B": 16 if problem.head_dim <= 64 else 32}]

    declare("test.tiled", configs=configs, arch=("cpu",))

    def lint(head_dim, config):
        rule = f"{{when: {{head_dim: {head_dim}}}, use: [{{variant: test.tiled, config: {config}}}]}}"
        (tmp_path / "mine.yaml").write_text(f"op: attention\narch: cpu\nrules: [{rule}]\n")
        return [f.severity for f in lint_tables(load_files([tmp_path])) if f.code == "unknown-config"]

    assert lint("64", "{B: 16}") == lint("128", "{B: 32}") == lint("64..", "{B: 32}") == []
    assert lint("64", "{B: 32}") == lint("128", "{B: 48}") == ["warning"]
    assert lint("64", "{B: -32}") == lint("128", "{C: 32}") == ["error"]


def test_lint_outlives_configs_that_cannot_be_asked(tmp_path, declare):
    declare("test.tiled", configs=lambda problem: 1 / 0, arch=("cpu",))
    (tmp_path / "mine.yaml").write_text(TABLE.format(config="{B: 1}"))
    assert [f for f in lint_tables(load_files([tmp_path])) if f.code == "unknown-config"] == []


def test_a_table_may_name_what_is_declared_for_the_problem(table, seen):
    table("{BLOCK_M: 32}")
    q = torch.randn(1, 1, 8, 16)
    registry.attention(q, q, q)
    assert seen == [{"BLOCK_M": 32}]
    assert "passed over" not in str(registry.attention.explain(q, q, q))


@pytest.mark.parametrize("config", [{"FOO": 1}, {"BLOCK_M": -5}, {"BLOCK_M": "16"}, {"BLOCK_M": True}, {"BLOCK_M": 64}])
def test_use_names_what_is_allowed(config, seen):
    q = torch.randn(1, 1, 8, 16)
    for call in (registry.attention, registry.attention.explain):
        with registry.use("test.tiled", config=config), pytest.raises(IllegalVariant, match="BLOCK_M") as caught:
            call(q, q, q)
        assert "16" in str(caught.value) or "{BLOCK_M}" in str(caught.value)
    assert seen == []


@pytest.mark.parametrize("config", [[1], {1: 2}, {"BLOCK_M": [16]}, {"BLOCK_M": None}])
def test_use_takes_flat_configs_alone(config, seen):
    with pytest.raises(InvalidArgument, match="config"), registry.use("test.tiled", config=config):
        pass


def test_a_rule_may_take_more_than_is_declared(declare):
    def rule(problem, config):
        return [] if config["B"] % 8 == 0 else [registry.Reason("rule", "B", config["B"], "multiples of 8")]

    declare("test.ruled", configs=[{"B": 8}, {"B": 16}], rule=rule)
    q = torch.randn(1, 1, 8, 16)
    with registry.use("test.ruled", config={"B": 64}):
        decision = registry.attention.explain(q, q, q)
        assert decision.config == {"B": 64} and "a config that it does not declare" in str(decision)
    assert any("does not declare: B=64" in text for text in notices.counts())
    with registry.use("test.ruled", config={"B": 16}):
        assert "does not declare" not in str(registry.attention.explain(q, q, q))
    for bad, why in (({"B": 12}, "multiples of 8"), ({"B": -8}, "such as 8, 16"), ({"C": 8}, "{B}")):
        with registry.use("test.ruled", config=bad), pytest.raises(IllegalVariant, match=why):
            registry.attention.explain(q, q, q)


def test_equal_configs_of_other_types_share_no_plan(declare):
    declare("test.ruled", configs=[{"B": 1}], rule=lambda problem, config: [])
    q = torch.randn(1, 1, 8, 16)
    with registry.use("test.ruled", config={"B": 1}):
        registry.attention(q, q, q)
    for alike in (True, 1.0):
        with registry.use("test.ruled", config={"B": alike}), pytest.raises(IllegalVariant):
            registry.attention(q, q, q)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_kernel_may_take_its_config_apart(prepared, declare):
    def run(q, k, v, *, scale, config):
        return q * config.pop("B"), None

    def prepare(problem, config):
        block = config.pop("B")
        return lambda q, k, v, **given: (q * block, None)

    declare("test.popping", run=run, configs=[{"B": 2}, {"B": 3}], **({"prepare": prepare} if prepared else {}))
    q = torch.ones(1, 1, 8, 16)
    with registry.use("test.popping"):
        assert [registry.attention(one, one, one).max() for one in (q, q, q[:, :, :4])] == [2, 2, 2]
        assert registry.attention.explain(q, q, q).config == {"B": 2}
