"""What holds for the files of the repository as a whole."""

import ast
import os
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"model", "workflows", "activities", "proxy_runtime", "scheduling", "events", "infra", "cli"}

MACHINE_PATHS = re.compile(r"(?<![\w.}])/(?:work|home/\w+|root)/")
REGISTRIES = re.compile(
    r"pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|deb\.debian\.org|repo1?\.maven|proxy\.golang\.org|crates\.io"
    r"|download\.pytorch\.org|--(?:extra-)?index-url|--find-links",
    re.IGNORECASE,
)
THIS = "tests/test_repository.py"
# It tells the maker of locks to leave addresses out.
LOCK_MAKER = "scripts/lock.sh"


@cache
def tracked():
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@cache
def texts():
    found = {}
    for path in tracked():
        try:
            found[str(path.relative_to(ROOT))] = path.read_text()
        except UnicodeDecodeError:
            continue  # not text
    assert len(found) > 50
    return found


def hits(pattern, leave_out=()):
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts().items()
        if name not in leave_out
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_path_of_a_machine():
    assert hits(MACHINE_PATHS, {THIS}) == []


def test_no_address_of_a_registry():
    assert hits(REGISTRIES, {THIS, LOCK_MAKER}) == []


@pytest.mark.parametrize("text", ["cd {}work/main", '"{}home/ann/x"', "={}root/x"])
def test_machine_paths_would_be_found(text):
    assert MACHINE_PATHS.search(text.format("/"))  # put together here: not even this file holds such a path


@pytest.mark.parametrize("text", ["https://pypi.org/simple", "--index-url x", "http://deb.debian.org/debian"])
def test_registries_would_be_found(text):
    assert REGISTRIES.search(text)


def most_lines(name):
    if name.startswith("tests/"):
        return 600
    return {".py": 450, ".cpp": 450, ".hpp": 450, ".c": 600}.get(Path(name).suffix)  # a program in C is one file


def test_modules_are_short():
    long = {
        name: lines
        for name, text in texts().items()
        if (limit := most_lines(name)) and (lines := len(text.splitlines())) > limit
    }
    assert long == {}


def imports(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def test_examples_import_nothing_of_ours():
    examples = {name: set(imports(text)) for name, text in texts().items() if re.match(r"examples/.*\.py$", name)}
    assert examples
    assert {name: found & (OURS | {"ergo_rank"}) for name, found in examples.items() if found & OURS} == {}


def test_what_is_injected_into_a_rank_imports_nothing_else_of_ours():
    folder = "proxy_runtime/rank/ergo_rank/"
    injected = {
        name: set(imports(text)) for name, text in texts().items() if name.startswith(folder) and name.endswith(".py")
    }
    assert {name: found & OURS for name, found in injected.items() if found & OURS} == {}


@cache
def locked(name):
    """The pins of a lock: package -> (version, number of hashes)."""
    text = re.sub(r"\\\n", " ", texts()[f"requirements/{name}.txt"])
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    pins = {}
    for line in lines:
        match = re.match(r"([a-z0-9][a-z0-9._-]*)==(\S+)(?: ; [^-]*)?((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*$", line)
        assert match, f"not a pin with hashes: {line[:80]}"
        pins[match[1]] = (match[2], match[3].count("--hash"))
    return pins


def wanted(name):
    lines = texts()[f"requirements/{name}.in"].splitlines()
    return {re.split(r"[<>=~! ]", line)[0] for line in lines if line and line[0] not in "#-"}


@pytest.mark.parametrize("name", ["runtime", "dev"])
def test_every_requirement_is_locked_with_hashes(name):
    assert wanted(name) <= set(locked(name))


def test_the_locks_agree():
    runtime, dev = locked("runtime"), locked("dev")
    assert {name: dev.get(name) for name in runtime} == runtime


def test_what_the_distribution_needs_is_what_is_locked():
    project = tomllib.loads(texts()["pyproject.toml"])["project"]
    assert {re.split(r"[<>=~! ]", line)[0] for line in project["dependencies"]} == wanted("runtime")


def test_every_package_is_in_the_distribution_and_under_the_import_contract():
    configuration = tomllib.loads(texts()["pyproject.toml"])["tool"]
    packages = {name.partition("/")[0] for name in texts() if name.count("/") == 1 and name.endswith("/__init__.py")}
    assert packages - {"benchmarks"} == OURS
    assert set(configuration["hatch"]["build"]["targets"]["wheel"]["packages"]) == OURS
    assert set(configuration["importlinter"]["root_packages"]) == OURS


def test_the_commands_that_documents_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", texts()["Makefile"], re.MULTILINE))
    named = {
        (name, target)
        for name, text in texts().items()
        if name.endswith(".md") or name == ".ci/run"
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    }
    assert ("README.md", "test") in named
    assert (".ci/run", "lint") in named
    assert {(name, target) for name, target in named if target not in targets} == set()


def test_links_in_documents_lead_somewhere():
    broken = [
        f"{name}: {link}"
        for name, text in texts().items()
        if name.endswith(".md")
        for link in re.findall(r"\]\(([^)#:\s]+)\)", text)
        if not (ROOT / name).parent.joinpath(link).exists()
    ]
    assert broken == []


def test_what_is_run_can_be_run():
    scripts = [ROOT / ".ci" / "run", *(ROOT / "scripts").glob("*.sh")]
    assert [str(path) for path in scripts if not os.access(path, os.X_OK)] == []


def test_design_records_have_a_number_each():
    names = [Path(name).name for name in texts() if name.startswith("docs/design/")]
    numbers = [name[:4] for name in names]
    assert all(re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", name) for name in names)
    assert len(set(numbers)) == len(numbers)
