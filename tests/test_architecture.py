"""The rules of structure, one test a rule: who may import whom, and what only one place may do.

Covers: every file of src/moax and lm/, the imports of tests/, the length of the files of benchmarks/, and the names of
variables in these and in scripts/ and examples/.
docs/design.md draws its layers from RANKS.
"""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moax
from moax.kernels import DEFAULT, IMPLEMENTATIONS, implementation
from moax.kernels.protocol import Kernels

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "moax"
FILES = sorted(SRC.rglob("*.py"))
LM = sorted((ROOT / "lm").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PROGRAMS = sorted(path for folder in ("scripts", "examples") for path in (ROOT / folder).rglob("*.py"))
MAX_LINES = 500  # an alarm, no goal

# A module may import modules of lower rank, and of its own rank only what SIDEWAYS names. `moax` is the package itself,
# with all its public names: only the programs above it may import that.
RANKS = {
    **dict.fromkeys(["checks", "recipe", "text", "types"], 0),
    "activations": 1,
    "mesh": 2,
    **dict.fromkeys(["config", "kernels"], 3),
    **dict.fromkeys(["params", "models"], 4),
    **dict.fromkeys(["reference", "exchange"], 5),
    **dict.fromkeys(["ops", "lora"], 6),
    **dict.fromkeys(["block", "layers"], 7),
    **dict.fromkeys(["nnx", "linen", "hf", "inspect", "estimate", "adapters"], 8),
    "moax": 9,
    **dict.fromkeys(["__main__"], 10),
}
SIDEWAYS = {
    "recipe": {"checks"},
    "types": {"checks", "recipe"},
    "layers": {"block"},
}
# Nothing computes with the oracle, though it lies below: only the package, and programs, show it.
SEES_REFERENCE = {"moax", "reference"}
# An op may use these other ops.
OPS_SIDEWAYS = {"router": {"balance"}, "matmul": {"weights"}}
PARTITIONING = {"PartitionSpec", "custom_partitioning", "shard_map"}
COLLECTIVES = {
    "all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "pmax", "pmean", "pmin", "ppermute", "pshuffle",
    "psum", "psum_scatter", "pswapaxes", "ragged_all_to_all",
}  # fmt: skip
PLATFORM_CALLS = {"jax.default_backend", "jax.extend.backend.get_backend", "jax.lax.platform_dependent"}
FIND_DEVICE = "moax.kernels.device.find_device"
PLATFORM_ATTRIBUTES = {"platform", "platform_version", "device_kind", "compute_capability"}
BY_NAME = rf"moax\.kernels\.({'|'.join(sorted(IMPLEMENTATIONS))})\b"
# The packages whose private functions have one line of docstring.
CORE = ("block/", "mesh/", "ops/", "exchange/", "kernels/")
# The most that src/moax has of what makes code dense: assignments `a, b = x, y` and conditional expressions per 1000
# lines of code, and the share of lines of code over 100 columns; then the arguments that nine of ten functions of
# block/ stay within. Docstrings, comments and blanks are no code.
PAIRS, CONDITIONALS, WIDE, ARGUMENTS = 10, 30, 0.03, 6
# Words that say nothing of a value, and what stands around one where Python may bind it.
VAGUE = {"found", "given", "made", "kept", "some", "most", "more", "at", "of", "how"}
BINDS_VAGUE = re.compile(rf"\b({'|'.join(VAGUE)})\b\s*([=,:)\]]|in\b)|\b(def|class|as)\s+({'|'.join(VAGUE)})\b")
# English that hides the subject of a sentence, and what to write.
PHRASES = {
    r"\b(is that|are those) of\b": "name the thing: `None means the dtype of x`",
    r"\b(lies?|lying) over\b": "an axis splits a dim",
    r"\b(stands?|has|have) for (itself|themselves)\b": "say whose it is: `each device's own`",
}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
# The modules of moax that lm/ imports, as a trainer of a user's own would: a command line may share ours.
PUBLIC = {"moax", "moax.inspect", "moax.ops", "moax.params", "moax.recipe"}
CORE_DEPENDENCIES = {"jax", "jaxlib", "numpy", "jaxtyping", "moax"}
# What a function of moax.adapters may import, beside the core.
FRAMEWORKS = {"absl", "flax", "haliax", "levanter", "maxtext", "tunix"}
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
        if isinstance(node, ast.Call):
            return f"{dotted(node.func)}()"
        return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "()"

    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node, dotted(node)


def but(*allowed: str) -> Iterator[Path]:
    """The files of src/moax, less those named: paths relative to it, a folder with a slash at its end."""
    return (path for path in FILES if not path.relative_to(SRC).as_posix().startswith(allowed))


def none_of(violations: Iterator[tuple[Path, ast.AST, str]], rule: str) -> None:
    """Fails with every violation: its place, and what is wrong there."""
    bad = [f"{where(path, node)}: {what}" for path, node, what in violations]
    assert not bad, f"{rule}:\n" + "\n".join(bad)


def mentioned(paths: Iterator[Path], asked: Callable[[str], bool]) -> Iterator[tuple[Path, ast.AST, str]]:
    """Every mention of a name of which `asked` is true."""
    return ((path, node, name) for path in paths for node, name in mentions(path) if asked(name))


def test_there_is_a_source_to_check():
    """Breaks if the other tests here pass by checking nothing."""
    assert len(FILES) > 50 and len(TESTS) > 20


def test_layers():
    """Breaks if a file imports from above, from its own layer more than SIDEWAYS says, or belongs to no layer."""
    unknown = sorted({part(module(path)) for path in FILES} - RANKS.keys())
    assert not unknown, f"give {unknown} a rank in tests/test_architecture.py"

    def refused(importer: str, target: str) -> bool:
        if importer in (target, "moax"):
            return False
        if target == "reference" and importer not in SEES_REFERENCE:
            return True
        return RANKS[target] >= RANKS[importer] and target not in SIDEWAYS.get(importer, set())

    none_of(
        ((path, node, f"{part(module(path))} imports {name}") for path in FILES for node, name in imported_modules(path)
         if refused(part(module(path)), part(name))),
        "an import against the layers of docs/design.md",
    )  # fmt: skip


def test_ops_do_not_import_one_another():
    """Breaks if ops meet anywhere but in the block; OPS_SIDEWAYS has the exceptions."""

    def op(name: str) -> str:
        return name.split(".")[2] if name.count(".") > 1 else ""

    inside = [path for path in FILES if module(path).startswith("moax.ops.")]
    none_of(
        ((path, node, name) for path in inside for node, name in imported_modules(path)
         if part(name) == "ops" and op(name) not in {op(module(path)), *OPS_SIDEWAYS.get(op(module(path)), set())}),
        "ops meet in the block",
    )  # fmt: skip


def test_no_long_file():
    """Breaks if a file is too long to be read in one go."""
    lines = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES + LM + BENCHMARKS
    }
    long = {str(path): n for path, n in lines.items() if n > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: {long}"


def test_an_op_file_has_its_parts_in_order():
    """Breaks if the user's function of an op does not come first, after the classes of its static arguments."""
    exported = {alias for _, _, alias in imports(SRC / "ops" / "__init__.py")}

    def list_misplaced() -> Iterator[tuple[Path, ast.AST, str]]:
        for path in (path for path in FILES if module(path).startswith("moax.ops.")):
            inner = False
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef) or getattr(node, "name", "") in exported:
                    yield from [(path, node, node.name)] * inner
                inner |= isinstance(node, ast.FunctionDef) and node.name.startswith("_")
                inner |= isinstance(node, ast.Assign) and "Op(" in ast.unparse(node.value)

    none_of(list_misplaced(), "classes, then what users call, then the local functions and the ops")


def test_an_implementation_has_every_function():
    """Breaks if an implementation lacks a function of `Kernels`, or one takes other arguments, which only a call on its
    own machine would show; or if moax calls a function that `Kernels` does not have."""
    nodes = (node for path in but("kernels/") for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute))
    receiver = re.compile(r"(implementation\(.*\)|local|kernels)$")
    called = {node.attr for node in nodes if receiver.match(ast.unparse(node.value))}
    functions = [name for name in vars(Kernels) if not name.startswith("_")]
    modules = {name: implementation(name) for name in IMPLEMENTATIONS}
    assert not called & set(vars(modules[DEFAULT])) - set(functions) and len(called & set(functions)) > 10
    for name, module in modules.items():
        assert sorted(module.__all__) == sorted(functions), f"{name}: {set(module.__all__) ^ set(functions)}"
        for function in functions:
            _, *wanted = inspect.signature(getattr(Kernels, function)).parameters.values()
            at_place = [p for p in wanted if p.kind is not inspect.Parameter.KEYWORD_ONLY]
            by_name = {p.name: p for p in wanted if p.kind is inspect.Parameter.KEYWORD_ONLY}
            inspect.signature(getattr(module, function)).bind(*at_place, **by_name)


def test_a_private_function_is_explained_in_one_line():
    """Breaks if a private function needs a text: its name says it, or a comment at the line with the reason does."""
    inside = [path for path in FILES if path.relative_to(SRC).as_posix().startswith(CORE)]
    none_of(
        ((path, node, node.name) for path in inside for node in ast.walk(tree(path))
         if isinstance(node, ast.FunctionDef) and re.match("_[^_]", node.name)
         and "\n" in (ast.get_docstring(node) or "")),
        "one line of docstring; a reason is a comment at its line",
    )  # fmt: skip


def code_lines(text: str) -> list[str]:
    """The lines of a file without docstrings, comments and blanks."""
    hidden = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            hidden.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    numbered = enumerate(text.splitlines(), 1)
    return [line for number, line in numbered if number not in hidden and line.strip() and line.strip()[0] != "#"]


def test_code_has_air():
    """Breaks if the library packs several statements in a line, branches in expressions, or arguments in block/."""
    lines = [line for path in FILES for line in code_lines(path.read_text())]
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    pairs = [
        node
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ]
    conditionals = [node for node in nodes if isinstance(node, ast.IfExp)]
    assert 1000 * len(pairs) / len(lines) <= PAIRS
    assert 1000 * len(conditionals) / len(lines) <= CONDITIONALS
    assert sum(len(line) > 100 for line in lines) / len(lines) <= WIDE
    block = [node for path in sorted((SRC / "block").glob("*.py")) for node in ast.walk(ast.parse(path.read_text()))]
    signatures = [node.args for node in block if isinstance(node, ast.FunctionDef)]
    counts = sorted(len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs) for args in signatures)
    assert counts[int(0.9 * len(counts))] <= ARGUMENTS


def bound_name(node: ast.AST) -> str | None:
    """The name that a node binds: of a variable, parameter, function or class, or the one after `as`."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.alias):
        return node.asname
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
        return node.name
    return None


def public_names(scope: ast.Module | ast.ClassDef) -> Iterator[ast.AST]:
    """The parameters of public functions and the fields of classes, which belong to the interface."""
    for node in scope.body:
        if isinstance(node, ast.AnnAssign) and isinstance(scope, ast.ClassDef):
            yield node.target
        elif isinstance(node, ast.FunctionDef) and not re.match("_[^_]", node.name):
            yield from ast.walk(node.args)
        elif isinstance(node, ast.ClassDef):
            yield from public_names(node)


def vague_names(path: Path) -> Iterator[tuple[Path, ast.AST, str]]:
    """Every name of VAGUE that a file binds, but for the interface of src/moax and the fields of other classes."""
    text = path.read_text(encoding="utf-8")
    # Most files bind no such name, and need no tree.
    if not BINDS_VAGUE.search(text):
        return
    module = ast.parse(text)
    in_library = path in FILES
    allowed = {id(node) for node in public_names(module) if in_library or not isinstance(node, ast.arg)}
    for node in ast.walk(module):
        if bound_name(node) in VAGUE and id(node) not in allowed:
            yield path, node, bound_name(node) or ""


def test_a_variable_says_what_it_holds():
    """Breaks if a variable, a function or a parameter has a name of VAGUE; the interface of src/moax and fields, whose
    owners say more, may."""
    paths = [*FILES, *LM, *BENCHMARKS, *TESTS, *PROGRAMS]
    none_of((place for path in paths for place in vague_names(path)), "a name says what the value is")


def test_a_sentence_names_its_subject():
    """Breaks if a docstring or a comment has a phrase of PHRASES."""
    violations = []
    for path in but("hf/", "estimate/", "inspect/"):
        text = path.read_text(encoding="utf-8")
        for phrase, instead in PHRASES.items():
            flat = re.compile(phrase.replace(" ", r"\s+(?:#\s+)?"))
            lines = (text.count("\n", 0, match.start()) + 1 for match in flat.finditer(text))
            violations += [f"{path.relative_to(ROOT)}:{line}: {instead}" for line in lines]
    assert not violations, "\n".join(violations)


def test_the_language_model_imports_public_names():
    """Breaks if lm/ reads as no program of a user's, since it imports what moax does not show."""
    imported = ((path, node, module, name) for path in LM for node, module, name in imported_names(path))
    ours = ((path, node, module, name) for path, node, module, name in imported if module.split(".")[0] == "moax")
    none_of(
        ((path, node, f"{module}: {name}") for path, node, module, name in ours
         if module not in PUBLIC or name.startswith("_")),
        f"lm/ imports public names, of {', '.join(sorted(PUBLIC))}",
    )  # fmt: skip
    above = ((path, node, name) for path in FILES for node, name, _ in imports(path))
    beside = ("lm", "benchmarks", "tests")
    none_of((f for f in above if f[2].split(".")[0] in beside), "the wheel holds src/moax alone")


def test_the_reference_says_what_is_public():
    """Breaks if lm/ may import a module, or `moax` has it by name, and the reference does not say that it is public."""
    page = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    section = page.partition("## What is public")[2].partition(" are public")[0]
    listed = set(re.findall(r"`(moax[\w.]*)`", section))
    unlisted = (PUBLIC | {f"moax.{name}" for name in moax._MODULES}) - listed
    assert listed <= MODULES, f"no modules: {sorted(listed - MODULES)}"
    assert not unlisted, f"not on the page: {sorted(unlisted)}"


def reads_platform(name: str) -> bool:
    attribute = "." in name and name.split(".")[-1] in PLATFORM_ATTRIBUTES
    return name in PLATFORM_CALLS or (attribute and name.split("()")[0] != FIND_DEVICE)


ONLY = {  # what only these files may do: the files, what they name, and what the others do instead
    "specs and partitioning": (
        ("mesh/", "params.py"),
        lambda name: PARTITIONING & set(name.split(".")) or name in ("jax.P", "jax.sharding.P"),
        "ask moax.params for specs, moax.mesh for how an op is partitioned",
    ),
    "collectives": (
        ("mesh/collectives.py", "mesh/op.py", "mesh/specs.py", "exchange/"),
        lambda name: name.startswith("jax.") and name.split(".")[-1] in COLLECTIVES,
        "collectives are called in exchange/ and mesh/{collectives,op,specs}.py",
    ),
    "the platform": (("kernels/device.py",), reads_platform, f"ask {FIND_DEVICE}()"),
    "the environment": ((), ENVIRONMENT.__contains__, "pass an argument"),
}


@pytest.mark.parametrize("what", ONLY)
def test_only_these_files_name(what):
    """Breaks if what one place does is written anywhere else."""
    allowed, asked, instead = ONLY[what]
    none_of(mentioned(but(*allowed), asked), instead)


def test_only_kernels_know_the_implementations():
    """Breaks if a file outside kernels/ names an implementation in a comparison, a call or a constant, or imports one:
    a third one would have to be added there too."""
    # estimate/ has the speeds of each one.
    named = (
        (path, node, ast.unparse(node))
        for path in but("kernels/", "estimate/")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        and (node.value in IMPLEMENTATIONS or re.fullmatch(rf"{BY_NAME}[\w.]*", node.value))
    )  # fmt: skip
    none_of(named, "`kernels` was chosen once, in moax.kernels: call what was chosen, or ask moax.kernels who can")
    taken = mentioned(but("kernels/"), lambda name: re.match(BY_NAME, name) is not None)
    none_of(taken, "take an implementation from moax.kernels, not by its name")


def test_dependencies():
    """Breaks if the library needs more than a plain `pip install moax` brings, but for the layers of flax."""
    known = sys.stdlib_module_names | CORE_DEPENDENCIES
    imported = ((p, node, name) for p in but("layers.py", "adapters/") for node, name, _ in imports(p))
    none_of((f for f in imported if f[2].split(".")[0] not in known), "the core has jax, jaxlib, numpy and jaxtyping")


def test_adapters_stay_apart():
    """Breaks if a file of moax needs an adapter, or an adapter imports a framework when it is imported itself."""
    imported = ((path, node, name) for path in but("adapters/") for node, name in imported_modules(path))
    none_of((f for f in imported if part(f[2]) == "adapters"), "only users import moax.adapters")
    inside = sorted((SRC / "adapters").glob("*.py"))
    known = sys.stdlib_module_names | CORE_DEPENDENCIES
    named = [(path, node, name) for path in inside for node, name, _ in imports(path)]
    outer = [entry for entry in named if entry[2].split(".")[0] not in known]
    assert {name.split(".")[0] for _, _, name in outer} == FRAMEWORKS
    none_of((entry for entry in outer if entry[1].col_offset == 0), "import a framework in a function")


def test_no_check_is_an_assert():
    """Breaks if a check vanishes under `python -O`."""
    assertions = ((p, node, "assert") for p in FILES for node in ast.walk(tree(p)) if isinstance(node, ast.Assert))
    none_of(assertions, "raise a ValueError that names argument, value and what would do")


def run(code: str, path: Path = SRC.parent) -> str:
    """What a program prints in a process of its own, in which `path` holds moax."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{code}\nfailed:\n{done.stderr[-3000:]}"
    return done.stdout


def test_import_needs_no_extra():
    """Breaks if `import moax`, or its command line, loads what only an extra brings."""
    code = "import {0}\nprint(*(m for m in sys.modules if '.' not in m))"
    for name in ("moax", "moax.__main__"):
        loaded = set(run(code.format(name)).split())
        assert not loaded & OPTIONAL, f"`import {name}` loads {sorted(loaded & OPTIONAL)}"


def test_modules_import_alone_and_by_their_names():
    """Breaks if an import starts JAX's backend, after which nobody can choose devices; or if a public function hides a
    module, so that `import moax.a.b as m` gives the function."""
    said = run(
        "import importlib, types\n"
        "from jax._src import xla_bridge\n"
        f"for name in {sorted(MODULES)}:\n"
        "    importlib.import_module(name)\n"
        "    if xla_bridge.backends_are_initialized(): sys.exit(print(name, 'starts the backend'))\n"
        f"for name in {sorted(MODULES)}:\n"
        "    names = {}\n"
        "    exec(f'import {name} as m', names)\n"
        "    if not isinstance(names['m'], types.ModuleType): print(name, 'is hidden by', names['m'])\n"
    ).strip()
    assert not said, said


WITHOUT_HOPPER = (
    "tests/block/test_moe.py::test_one_device",
    "tests/block/test_quantized.py::test_against_rounded_operands[fp8_block-none--auto]",
    "tests/ops/test_grouped_matmul.py::test_bfloat16",
    "tests/ops/test_quantize.py::test_matches_numpy",
    "tests/ops/test_permute.py::test_round_trip",
    "tests/ops/test_exchange.py::test_one_device",
    "tests/ops/test_activation.py::test_values_and_derivatives",
    "tests/ops/test_dense.py::test_batches",
    "tests/mesh/test_partition.py::test_auto_axes",
    "tests/block/test_moe_behaviour.py::test_everything_on_one_expert_drops_nothing",
    "tests/block/test_kept.py::test_bits_are_those_of_a_block_that_quantizes[2x4-custom_partitioning-fp8_block-experts]",
    "tests/block/test_lora.py::test_is_the_merged_block[2x4-custom_partitioning-True-config0-options0]",
)


@pytest.mark.more
def test_kernels_can_be_deleted(tmp_path):
    """Breaks if a test that needs no Hopper kernel fails without the folder kernels/hopper."""
    ignored = shutil.ignore_patterns("hopper", "__pycache__")
    shutil.copytree(SRC, tmp_path / "moax", ignore=ignored)
    code = "import moax; print(moax.__file__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    here = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert str(tmp_path) in here.stdout, f"another moax than the copy was tested: {here.stdout}{here.stderr[-2000:]}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *WITHOUT_HOPPER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:]


def test_import_of_a_test_needs_one_device():
    """Breaks if `make test-gpu` ends with an error on fewer than 8 GPUs: it imports the files of all tests."""
    of_import = (
        (path, call)
        for path in TESTS
        for statement in tree(path).body
        for part in getattr(statement, "decorator_list", [statement])
        for call in ast.walk(part)
        if isinstance(call, ast.Call)
    )
    names = ((path, call, ast.unparse(call.func).split(".")[-1]) for path, call in of_import)
    meshes = (
        (path, call, name)
        for path, call, name in names
        if name in ("make_mesh", "mesh_with") and ast.unparse(call.args[0]) != "(1, 1)"
    )
    none_of(meshes, "make a mesh of several devices inside of a test, or an AbstractMesh")


def test_no_test_imports_another():
    """Breaks if a helper of two test files is in one of them: it belongs to tests/support."""
    names = {path.stem for path in TESTS if path.stem.startswith("test_")}
    imported = (
        (path, node, name) for path in TESTS for node, name, _ in imported_names(path) if name.split(".")[0] in names
    )
    none_of(imported, "put what two test files need into tests/support")


def imported_names(path: Path) -> Iterator[tuple[ast.stmt, str, str]]:
    """(statement, module, name) of every import of a test file; none there is relative."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, node.module or "", alias.name) for alias in node.names)
