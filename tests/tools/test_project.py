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
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in form["body"])


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
