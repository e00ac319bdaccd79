"""Measures the structure of the product code from its syntax trees.

A subpackage is a package or a module directly below `fedemb`. Imports inside
functions and under `TYPE_CHECKING` count like all others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "components" / "fedemb"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Function:
    """A function or method of the product.

    Attributes:
      name: qualified by its class, with the module.
      lines: physical lines of the definition without decorators, docstring included.
      parameters: number of its parameters without `self` and `cls`.
      public: whether neither it nor its class has a leading underscore.
      any_count: number of `Any` in its signature.
    """

    name: str
    lines: int
    parameters: int
    public: bool
    any_count: int


@dataclass(frozen=True)
class Module:
    """A module of the product.

    Attributes:
      name: as it is imported, such as `fedemb.privacy.guarantee`.
      path: of its file.
    """

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def subpackage(self) -> str:
        """Name of its subpackage; `fedemb` for the package itself."""
        return ".".join(self.name.split(".")[:2]).removeprefix("fedemb.")

    def imports(self, modules: Mapping[str, Module]) -> Iterator[str]:
        """Yields the names of the modules of the product that it imports.

        Args:
          modules: name -> module of the whole product.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (item.name for item in node.names if item.name in modules)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for item in node.names:
                    inner = f"{node.module}.{item.name}"
                    if inner in modules:
                        yield inner
                    elif node.module in modules:
                        yield node.module

    def any_at_seams(self) -> int:
        """Returns the number of `Any` in public signatures, attributes of public classes and names.

        An alias of a type with `Any`, such as `Json = dict[str, Any]`, counts once.
        """
        return sum(item.any_count for item in self.functions() if item.public) + _names(self.tree)

    def functions(self) -> Iterator[Function]:
        """Yields its functions and methods, those defined inside other functions too."""
        yield from _functions(self.tree, self.name, public=True)


def _functions(node: ast.AST, prefix: str, *, public: bool) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            name = f"{prefix}.{child.name}"
            visible = public and (not child.name.startswith("_") or child.name == "__init__")
            given = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
            names = [item.arg for item in given if item.arg not in ("self", "cls")]
            rest = [item for item in (child.args.vararg, child.args.kwarg) if item]
            hints = [item.annotation for item in (*given, *rest) if item.annotation]
            hints += [child.returns] if child.returns else []
            yield Function(
                name=name,
                lines=(child.end_lineno or child.lineno) - child.lineno + 1,
                parameters=len(names),
                public=visible,
                any_count=sum(_any_count(hint) for hint in hints),
            )
            yield from _functions(child, name, public=False)
        elif isinstance(child, ast.ClassDef):
            visible = public and not child.name.startswith("_")
            yield from _functions(child, f"{prefix}.{child.name}", public=visible)
        else:
            yield from _functions(child, prefix, public=public)


def _names(tree: ast.Module) -> int:
    """Returns the number of `Any` in attributes of public classes and in names for types."""
    found = 0
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) if node.name[0] != "_"]
    for body in (tree.body, *(node.body for node in classes)):
        for node in body:
            if isinstance(node, ast.AnnAssign):
                found += _any_count(node.annotation)
                if ast.unparse(node.annotation) == "TypeAlias" and node.value:
                    found += _any_count(node.value)
            elif isinstance(node, ast.Assign):
                found += _any_count(node.value)
    return found


def _any_count(hint: ast.expr) -> int:
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(hint))


def modules() -> dict[str, Module]:
    """Returns all modules of the product by name, packages included."""
    found: dict[str, Module] = {}

    def collect(folder: Path, prefix: str) -> None:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and (path / "__init__.py").is_file():
                collect(path, f"{prefix}.{path.name}")
            elif path.suffix == ".py":
                name = prefix if path.name == "__init__.py" else f"{prefix}.{path.stem}"
                found[name] = Module(name, path)

    collect(LIBRARY, "fedemb")
    return found


def import_graph(product: Mapping[str, Module]) -> dict[str, set[str]]:
    """Returns module -> modules that it imports.

    A package's own `__init__` is not counted as imported by its modules, although Python runs it.
    """
    return {name: {*module.imports(product)} - {name} for name, module in product.items()}


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Returns the nodes of a cycle, its first node again at the end; empty: no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def subpackage_graph(product: Mapping[str, Module]) -> dict[str, set[str]]:
    """Returns subpackage -> other subpackages that it imports."""
    found: dict[str, set[str]] = {module.subpackage: set() for module in product.values()}
    for name, others in import_graph(product).items():
        source = product[name].subpackage
        found[source] |= {product[other].subpackage for other in others} - {source}
    return found
