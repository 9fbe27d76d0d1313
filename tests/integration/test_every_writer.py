"""Terminal, HTML, Markdown, JUnit and the short summary: the same causes, verdicts and units."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from tests.pytest_project import Project
from tests.report.html.parsed import Page

TESTS = """
    import net

    @pytest.mark.gpumem
    @pytest.mark.parametrize("mib", [1, 2, 4])
    def test_same(mib):
        net.run(mib)

    @pytest.mark.gpumem(max="1MB")
    def test_limit():
        torch.zeros(1 << 20, device="cuda")

    @pytest.mark.gpumem(max_leak=0)
    def test_leak():
        net.KEPT.append(torch.zeros(1 << 18, device="cuda"))
"""
NET = """
    KEPT = []

    def run(mib):
        first = torch.zeros(mib << 18, device="cuda")
        second = torch.exp(first)
"""
SAME = "net.py:9 (torch.sin) takes … of temporaries that were not there before"


def test_all_reports_have_the_same_causes_verdicts_and_units(project: Project) -> None:
    project.write(net=NET, test_it=TESTS)
    project.run("--gpumem-update-baselines")
    project.write(net=NET + "        third = torch.sin(second)\n", test_it=TESTS)
    paths = {kind: project.path / f"report.{kind}" for kind in ("html", "markdown", "xml")}

    result = project.run_apart(
        f"--gpumem-report=html:{paths['html']}",
        f"--gpumem-report=markdown:{paths['markdown']}",
        f"--junitxml={paths['xml']}",
    )

    lines = result.outlines
    terminal = "\n".join(lines)
    page = Page(paths["html"].read_text()).overview
    markdown = paths["markdown"].read_text()
    cases = {
        case.get("name", ""): {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
        for case in ElementTree.parse(paths["xml"]).iter("testcase")
    }
    # Three causes, of which one is that of three tests.
    causes = {tuple(cause["words"]): len(cause["tests"]) for cause in page["causes"]}
    assert sorted(causes.values()) == [1, 1, 3]
    shared = next(words[0] for words, count in causes.items() if count == 3)
    assert shared.startswith(SAME)
    assert sum(line.startswith("net.py:9 (torch.sin) takes") for line in lines) == 1
    assert "in 2 more tests, 1.0 MiB to 4.0 MiB over: " in terminal
    assert markdown.count("net.py:9 (torch.sin) takes") == 1
    assert "the same cause in 2 tests, +1.0 MiB to +4.0 MiB: `test_it.py::test_same[2]`" in markdown
    shown = {case["gpumem_cause"] for name, case in cases.items() if "same" in str(name)}
    assert len(shown) == 3
    assert all(re.sub(r"\d\.0 MiB", "…", cause).startswith(SAME) for cause in shown)
    # One verdict stands for each test.
    for name, case in cases.items():
        brief = case["gpumem_over"]
        told_alone = str(name) in ("test_same[1]", "test_limit", "test_leak")
        assert (f"FAILED test_it.py::{name} - {brief}" in terminal) == told_alone
    rows = {row["id"].partition("::")[2]: row["why"] for row in page["tests"]}
    assert rows == {name: case["gpumem_over"] for name, case in cases.items()}
    assert any("net.KEPT[0] keeps 1.0 MiB after the test" in words[0] for words in causes)
    assert "net.KEPT[0] keeps 1.0 MiB after the test" in terminal
    assert "net.KEPT[0] keeps 1.0 MiB after the test" in markdown
    # One family of units, also where the test's limit is in the other one.
    for text in (terminal, markdown, str(page), *rows.values(), *map(str, cases.values())):
        assert not set(re.findall(r"\d ?(KB|MB|GB)\b", text)), text
    assert "3.0 MiB over its limit of 976.6 KiB (1,000,000 B)" in terminal
    assert "FAILED test_it.py::test_limit - +3.0 MiB over 976.6 KiB" in terminal
