"""Find tests that cannot work when answer and tests run in separate sandboxes; only their source is read."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator

from roll.config.sandbox import SandboxConfig
from roll.rewards.code.packages import build_package_mounts
from roll.rewards.code.tasks import Task, TestCase

__all__ = ["describe_unsupported", "find_importable_modules"]

_FILE_FIXTURES = {"tmp_path", "tmpdir", "tmp_path_factory", "tmpdir_factory"}
_REPLACEABLE_NAMES = ("builtins.input", "builtins.print", "sys.stdin", "sys.stdout", "sys.stderr")
"""Names that tests may monkeypatch, because the answer's process looks them up in the process of the tests."""


def find_importable_modules(config: SandboxConfig) -> frozenset[str] | None:
    """Return the modules of the packages that are mounted for tests; `None` for sandboxes other than bubblewrap.

    Raises:
        ConfigError: A package is not installed.
    """
    if config.runtime != "bubblewrap":
        return None
    mounts = build_package_mounts([*config.program_packages, "pytest"], "")
    return frozenset(mount.target.strip("/").removesuffix(".py") for mount in mounts)


def describe_unsupported(task: Task, packages: frozenset[str] | None) -> str:
    """Return the reason why correct answers would fail these tests; an empty string if no reason is known.

    Args:
        task: The task with the tests.
        packages: The modules that tests may import, from `find_importable_modules`.
    """
    for index, case in enumerate(task.cases):
        if isinstance(case, TestCase):
            tree = ast.parse(f"{task.setup}\n{case.source}")
            reason = next(_find_reasons(tree, {*case.modules, "solution"}, packages), "")
            if reason:
                return f"case {index} {reason}"
    return ""


def _find_reasons(tree: ast.Module, candidate_names: set[str], packages: frozenset[str] | None) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module or ""}
            tops = {module.partition(".")[0] for module in modules}
            missing = sorted(tops - candidate_names - sys.stdlib_module_names - (packages or frozenset()))
            if missing and packages is not None:
                yield (
                    f"imports '{missing[0]}', which is not installed in the sandboxes: add its package to "
                    "sandbox.packages"
                )
    known = _find_defined_names(tree, candidate_names)
    for node in ast.walk(tree):
        bases = node.bases if isinstance(node, ast.ClassDef) and "*" not in known else []
        derived = {base.id for base in bases if isinstance(base, ast.Name)} - known
        if derived:
            yield f"derives a class from '{min(derived)}', which is in another process"
        yield from _check_node(node, candidate_names)


def _find_defined_names(tree: ast.Module, candidate_names: set[str]) -> set[str]:
    """Return the names that are built in or defined by the tests: variables, classes and imports.

    Imports from the modules in `candidate_names` are left out, since these modules stand for the candidate's code. If a
    module is imported with `import *`, the result contains `*`.
    """
    names = set(vars(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom) and node.module not in candidate_names:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _check_node(node: ast.AST, candidate_names: set[str]) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if files := _FILE_FIXTURES & {each.arg for each in node.args.args}:
            yield f"uses '{min(files)}': the answer runs in another sandbox and cannot open the files of the tests"
    elif isinstance(node, ast.Call):
        yield from _check_call(node, candidate_names)
    elif isinstance(node, ast.Attribute) and node.attr == "__code__":
        yield "inspects the code of a function, which is in another process"


def _check_call(node: ast.Call, candidate_names: set[str]) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name.endswith(("inspect.getsource", "inspect.signature", "getsource")):
        yield "inspects the code of a function, which is in another process"
    if name.endswith("monkeypatch.setenv"):
        yield "sets environment variables, which do not reach the process of the answer"
    if not name.endswith(("patch", "setattr", "patch.object")) or not node.args:
        return
    first = node.args[0]
    target = first.value if isinstance(first, ast.Constant) else None
    if isinstance(target, str) and "." in target and not target.startswith(_REPLACEABLE_NAMES):
        yield f"replaces '{target}', which does not change the process of the answer"
    if (
        isinstance(first, ast.Name)
        and (first.id in candidate_names or first.id in sys.stdlib_module_names)
        and "." in name
    ):
        attribute = next((str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant)), "…")
        if f"{first.id}.{attribute}" not in _REPLACEABLE_NAMES:
            yield f"replaces '{first.id}.{attribute}', which does not change the process of the answer"
