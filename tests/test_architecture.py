"""DESIGN.md section 2: who may import whom, and what only one file may do. Each "only" is one test here."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "moax"
FILES = sorted(SRC.rglob("*.py"))
MAX_LINES = 400

# A module may import those of lower rank, and of its own rank only what SIDEWAYS names. `moax` is the package itself,
# with all its public names: only the programs above it may import that.
RANKS = {
    **dict.fromkeys(["axes", "config", "groups", "recipe", "types", "reference", "_hlo"], 0),
    **dict.fromkeys(["sharding", "partition", "backend", "kernels", "mesh", "mosaic"], 1),
    "ops": 2,
    **dict.fromkeys(["init", "block", "moe"], 3),
    **dict.fromkeys(["nnx", "linen", "hf", "info", "inspect"], 4),
    **dict.fromkeys(["estimate", "estimate_data", "estimate_times", "estimate_wires"], 4),
    "moax": 5,
    **dict.fromkeys(["cli", "train", "bench", "__main__"], 6),
}
SIDEWAYS = {
    "recipe": {"config"},
    "types": {"axes", "config", "groups", "recipe"},
    "reference": {"config", "types"},
    "partition": {"backend", "sharding"},
    "moe": {"block"},
    "kernels": {"backend"},
    "mosaic": {"backend", "kernels", "partition"},
    "estimate_times": {"estimate_data", "estimate_wires"},
    "estimate": {"estimate_data", "estimate_times", "estimate_wires"},
    "bench": {"train"},
    "cli": {"train", "bench"},
    "__main__": {"cli"},
}
# Lower, and forbidden all the same. Kernels take arrays and a TileConfig; nothing computes with the oracle.
NEVER = {name: {"reference"} for name in RANKS if name not in ("moax", "cli", "train", "bench", "reference")}
NEVER["kernels"] |= {"axes", "config"}

OPS_SIDEWAYS = {
    "grouped_matmul": {"quantize"},
    "activation": {"quantize"},
    "dense": {"quantize", "grouped_matmul"},
    "exchange": {"one_sided", "quantize"},
}
PARTS = ("bench/gather.py", "bench/rounds.py")  # measure a part of the block by itself
# Layers and exchanges without moax, which have to bring their own.
LAYERS = ("bench/peers/native.py", "bench/peers/public.py", "bench/peers/wires.py")
PARTITIONING = {"PartitionSpec", "custom_partitioning", "shard_map"}
COLLECTIVES = {
    "all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "pmax", "pmean", "pmin", "ppermute", "pshuffle",
    "psum", "psum_scatter", "pswapaxes", "ragged_all_to_all",
}  # fmt: skip
PLATFORM_CALLS = {"jax.default_backend", "jax.extend.backend.get_backend", "jax.lax.platform_dependent"}
PLATFORM_ATTRIBUTES = {"platform", "platform_version", "device_kind", "compute_capability"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
CORE_DEPENDENCIES = {"jax", "numpy", "jaxtyping", "moax"}
OPTIONAL = {"flax", "optax", "orbax", "matplotlib", "rich"}


def module(path: Path) -> str:
    """src/moax/ops/route.py -> moax.ops.route; src/moax/ops/__init__.py -> moax.ops."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path) for path in FILES}


def part(name: str) -> str:
    """The unit of RANKS that a module belongs to: moax.ops.route -> ops, moax -> moax."""
    return name.split(".")[1] if "." in name else name


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def imports(path: Path) -> Iterator[tuple[ast.stmt, str, str]]:
    """(statement, what it imports in full, the name it binds), at any depth of the file, relative ones resolved."""
    package = module(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                yield node, alias.name, bound
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                yield node, f"{base}.{alias.name}", alias.asname or alias.name


def imported_modules(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, module of moax it imports): `from moax import moe` is moax.moe, `from moax import MoEConfig` moax."""
    for node, name, _ in imports(path):
        if name.split(".")[0] == "moax":
            while name not in MODULES | {"moax"}:
                name = name.rpartition(".")[0]
            yield node, name


def mentions(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """(node, dotted name) of every import, name and attribute, import aliases resolved: `lax.psum` is jax.lax.psum."""
    bound = {}
    for node, name, alias in imports(path):
        bound[alias] = name if not isinstance(node, ast.Import) or alias != name.split(".")[0] else alias
        yield node, name

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return bound.get(node.id, node.id)
        return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "()"

    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node, dotted(node)


def but(*allowed: str) -> list:
    """The files of src/moax as parameters, less those named: paths relative to it, folders with a slash at the end."""
    names = [(path, path.relative_to(SRC).as_posix()) for path in FILES]
    return [pytest.param(path, id=name) for path, name in names if not name.startswith(allowed)]


def test_there_is_a_source_to_check():
    assert FILES, f"no Python file under {SRC}: every other test here would pass by checking nothing"


def check(bad: list[str], breaks: str):
    assert not bad, f"{breaks}:\n" + "\n".join(bad)


@pytest.mark.parametrize("path", but())
def test_layers(path):
    importer = part(module(path))
    assert importer in RANKS, f"{path} has no layer; give `{importer}` its rank in tests/test_architecture.py"

    def allowed(target: str) -> bool:
        below = RANKS.get(target, RANKS[importer]) < RANKS[importer] or target in SIDEWAYS.get(importer, set())
        return importer in (target, "moax") or (below and target not in NEVER.get(importer, set()))

    found = [(node, name) for node, name in imported_modules(path) if not allowed(part(name))]
    check(
        [f"{where(path, node)}: {importer} imports {name}" for node, name in found], "against the layers of DESIGN.md 2"
    )


@pytest.mark.parametrize("path", [p for p in but("ops/__init__.py") if p.id.startswith("ops/")])
def test_ops_do_not_import_one_another(path):
    allowed = {f"moax.ops.{name}" for name in OPS_SIDEWAYS.get(path.stem, set())} | {module(path)}
    found = [(node, name) for node, name in imported_modules(path) if part(name) == "ops" and name not in allowed]
    check(
        [f"{where(path, node)}: {name}" for node, name in found], "ops meet in moe.py; OPS_SIDEWAYS has the exceptions"
    )


@pytest.mark.parametrize("path", but())
def test_no_long_file(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{path} has {lines} lines; more than {MAX_LINES} is not read in one go: split it"


@pytest.mark.parametrize("path", but("sharding.py", "partition.py", *PARTS, *LAYERS))
def test_only_sharding_names_specs_and_partitioning(path):
    found = [
        f"{where(path, node)}: {name}"
        for node, name in mentions(path)
        if PARTITIONING & set(name.split(".")) or name in ("jax.P", "jax.sharding.P")
    ]
    check(found, "moax.sharding is the one place for specs, moax.partition for how an op is partitioned; ask them")


@pytest.mark.parametrize("path", but("partition.py", "ops/exchange.py", *LAYERS))
def test_only_exchange_and_partition_call_collectives(path):
    found = [
        f"{where(path, node)}: {name}"
        for node, name in mentions(path)
        if name.startswith("jax.") and name.split(".")[-1] in COLLECTIVES
    ]
    check(found, "what crosses the wire is to be read in two files, ops/exchange.py and partition.py")


@pytest.mark.parametrize("path", but("backend.py"))
def test_only_backend_reads_the_platform(path):
    found = [
        f"{where(path, node)}: {name}"
        for node, name in mentions(path)
        if name in PLATFORM_CALLS
        or ("." in name and name.split(".")[-1] in PLATFORM_ATTRIBUTES and not name.startswith("moax.backend."))
    ]
    check(found, "which implementation runs is decided in backend.py alone; ask it")


@pytest.mark.parametrize("path", but("backend.py", "cli.py", "bench/peers/ragged_peer.py"))
def test_no_environment_variables(path):
    found = [f"{where(path, node)}: {name}" for node, name in mentions(path) if name in ENVIRONMENT]
    check(found, "no environment variable changes results: pass an argument (cli.py sets up devices, a peer flags)")


@pytest.mark.parametrize("path", but("nnx.py", "linen.py"))
def test_only_the_layers_import_flax(path):
    found = [f"{where(path, node)}: {name}" for node, name, _ in imports(path) if name.split(".")[0] == "flax"]
    check(found, "breaks without the extra `flax`, which only nnx.py and linen.py may need")


@pytest.mark.parametrize("path", but("nnx.py", "linen.py", "cli.py", "train/", "bench/"))
def test_core_dependencies(path):
    known = sys.stdlib_module_names | CORE_DEPENDENCIES
    found = [f"{where(path, node)}: {name}" for node, name, _ in imports(path) if name.split(".")[0] not in known]
    check(found, "breaks after a plain `pip install moax`, which brings jax, numpy and jaxtyping")


@pytest.mark.parametrize("path", but())
def test_no_assert_statement(path):
    found = [where(path, node) for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)]
    check(found, "`python -O` removes asserts; raise a ValueError that names argument, value and what would do")


@pytest.mark.parametrize("path", but())
def test_nothing_left_over(path):
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    found = [f"{path}:{i}: {line.strip()}" for i, line in lines if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line)]
    check(found, "do it now, or file an issue")


def run(code: str, path: Path = SRC.parent) -> str:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{code}\nfailed:\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("name", sorted({"moax", "moax.cli"} & MODULES))
def test_import_needs_no_extra(name):
    loaded = set(run(f"import {name}\nprint(*(m for m in sys.modules if '.' not in m))").split())
    check(sorted(loaded & OPTIONAL), f"`import {name}` loads what only an extra brings")


def test_import_starts_no_backend():
    names = sorted(MODULES - {"moax.__main__"})
    first = run(
        "import importlib\n"
        "from jax._src import xla_bridge\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    if xla_bridge.backends_are_initialized(): sys.exit(print(name))\n"
    ).strip()
    assert not first, f"importing {first} starts JAX's backend; after that nobody can choose devices or platform"


@pytest.mark.skipif(not (SRC / "kernels").exists(), reason="there are no kernels to delete")
def test_kernels_can_be_deleted(tmp_path):
    shutil.copytree(SRC, tmp_path / "moax", ignore=shutil.ignore_patterns("kernels", "__pycache__"))
    run(
        "import jax, moax\n"
        "config = moax.MoEConfig(d_model=8, d_ff=16, num_experts=4, top_k=2)\n"
        "y, _ = moax.moe(jax.numpy.ones((4, 8)), moax.init(jax.random.key(0), config), config)\n"
        "if not jax.numpy.isfinite(y).all(): sys.exit('not finite')",
        tmp_path,
    )


def declared() -> dict[str, Requirement]:
    """What constraints.txt answers for: the core and every extra but the accelerator's, by canonical name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if k != "cuda13"}
    found = map(Requirement, [*project["dependencies"], *sum(extras.values(), [])])
    return {canonicalize_name(r.name): r for r in found}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line.strip() and not line.startswith("#")]
    bad = [line for line in entries if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!+]*", line)]
    assert not bad, f"constraints.txt holds NAME==VERSION and nothing else, for every platform: {bad}"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in entries)}


def test_constraints_pin_each_dependency():
    pins = pinned()
    unpinned = sorted(declared().keys() - pins.keys())
    assert not unpinned, f"two clones would install different versions of {unpinned}: `make constraints`"
    outside = [str(r) for name, r in declared().items() if not r.specifier.contains(pins[name])]
    assert not outside, f"constraints.txt pins a version that pyproject.toml does not admit: {outside}"


def requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # an environment without that extra; `make test` has them all


def test_constraints_pin_what_those_need():
    pins, todo, seen = pinned(), list(declared().values()), set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in (requirement.extras | {""}) - {e for n, e in seen if n == name}:
            seen.add((name, extra))
            needs = map(Requirement, requires(name))
            todo += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    unpinned = sorted({name for name, _ in seen} - pins.keys())
    assert not unpinned, f"two clones would install different versions of {unpinned}: `make constraints`"


def test_no_accelerator_package_in_constraints():
    bad = [name for name in pinned() if re.match(r"nvidia-|jax-cuda|libtpu|torch$", name)]
    assert not bad, f"a CPU machine would download {bad}"
