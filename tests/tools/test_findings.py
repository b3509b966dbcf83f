"""The texts of rules: one without text or example fails before any script is checked."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

import stepladder
from stepladder.cli.check import show_report
from stepladder.tools.check.check import Report
from stepladder.tools.check.relations.comparison import EXPLANATIONS
from stepladder.tools.check.rules import all_rules
from stepladder.tools.check.rules.evidence import CHECK_TEXTS, run_rule, source_rule
from stepladder.tools.findings.finding import Catalogue, Location, RuleText
from stepladder.tools.lint.lint import LINT_RULES

TOOLS = Path(stepladder.__file__).parent / "tools"
CORPUS = Path(__file__).parents[1] / "check_corpus"
MAKE_FINDINGS = ("finding", "finding_at", "make_finding", "problem")


def names_in(tool: str) -> set[str]:
    """Return the rules that a tool's code names where it makes a finding."""
    names = set()
    for path in (TOOLS / tool).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                function = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if function in MAKE_FINDINGS:
                    choices = ast.walk(node.args[0])
                    names |= {c.value for c in choices if isinstance(c, ast.Constant)}
    return {name for name in names if isinstance(name, str)}


@pytest.mark.parametrize("tool", ["check", "doctor", "lint"])
def test_every_finding_that_the_code_makes_has_its_texts(tool: str) -> None:
    texts = Catalogue(f"stepladder.tools.{tool}").texts
    assert names_in(tool)
    assert names_in(tool) <= texts.keys()
    assert all(
        text.cause and text.fix and (text.example or text.evidence) for text in texts.values()
    )


def test_a_rule_without_text_or_example_fails_at_import() -> None:
    with pytest.raises(ValueError, match=r"no text in rules.toml for not-there"):
        run_rule("not-there")
    with pytest.raises(ValueError, match="rule short lacks"):
        RuleText("short", "error", cause="c.", fix="f", what="w.")


RELATIONS = {"gradients", "learning-rate", "shown-numbers"}  # for which no rule is registered


def test_every_text_of_check_belongs_to_a_rule_that_is_registered_or_to_resume() -> None:
    rules = [*run_rule.rules, *source_rule.rules]
    found = {name for rule in rules for name in rule.names} | names_in("check")
    found |= {cause.rule for cause in EXPLANATIONS}
    assert found | RELATIONS == set(CHECK_TEXTS.texts)
    assert len(LINT_RULES) <= len(Catalogue("stepladder.tools.lint").texts)
    assert all_rules


def test_every_rule_of_check_has_a_script_in_the_corpus() -> None:
    scripts = tomllib.loads((CORPUS / "corpus.toml").read_text())["script"]
    named = [script for script in scripts if "unnamed" not in script]  # which no rule finds
    by_other_flags = {"preempted"}  # of --preempt, whose scripts are those of preemptions.py
    assert {rule for script in named for rule in script["rules"]} | by_other_flags == {
        rule.id for rule in CHECK_TEXTS.rules
    }


def test_the_twelve_most_serious_findings_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [CHECK_TEXTS.finding("hang", Location("a.py", line), "seen") for line in range(14)]
    show_report(Report(findings=findings), as_json=False)
    shown = capsys.readouterr().out
    assert shown.count("error hang: a.py:") == 12
    assert "2 errors, 0 warnings, 0 notes more: --json has all\n" in shown
