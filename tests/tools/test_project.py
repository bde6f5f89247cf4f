"""The files that a hosting site and an index read: the workflow, the forms, the citation and the version."""

import tomllib

import pytest

import moax
from support import ROOT

yaml = pytest.importorskip("yaml")
GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_workflow_runs_what_a_submission_must_pass():
    """Breaks if the hosting site runs fewer tests than .ci/run, builds no documentation, or names a missing file."""
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    assert {step["run"] for step in steps if "run" in step} == {".ci/run", "make docs"}
    setups = [step["with"] for step in steps if "setup-python" in step.get("uses", "")]
    assert len(setups) == len(jobs)
    for setup in setups:
        assert (ROOT / setup["python-version-file"]).exists()
        assert (ROOT / setup["cache-dependency-path"]).exists()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_can_be_read(path):
    """Breaks if the site refuses a form: a field without a label, or two fields of one id."""
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in fields)


def test_a_bug_report_can_be_reproduced():
    """Breaks if a report may leave out the versions, the program, the mesh or the recipe."""
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    fields = {field["id"]: field for field in form["body"] if field["type"] != "markdown"}
    assert all(fields[name]["validations"]["required"] for name in ("versions", "program", "mesh", "recipe"))
    assert "python -m moax" in fields["versions"]["attributes"]["description"]


def test_a_citation_can_be_read():
    """Breaks if CITATION.cff lacks a field that its format requires."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}


def test_one_version():
    """Breaks if the version stands in a second place, or the build no longer reads it from the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and "version" in project["project"]["dynamic"]
    source = ROOT / project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{moax.__version__}"' in source.read_text()
