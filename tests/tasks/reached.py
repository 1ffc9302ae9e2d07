"""What a function can reach: its source, the sources of what it calls, and so on through the packages that are walked.

Names are resolved as Python would: locals of an enclosing function, globals of the module, attributes of modules and classes. A
call of a method of some value is taken to be any function of that name in the classes that the walk has seen, and counts by its
name. So more is found than can happen, and nothing less.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any


@functools.cache
def tree_of(code: types.CodeType) -> ast.AST | None:
    try:
        lines = inspect.getsource(code)
    except (OSError, TypeError):
        return None
    return ast.parse(textwrap.dedent(lines))


def reached(start: Callable[..., Any], packages: tuple[str, ...], owner: type | None = None) -> set[str]:
    """Dotted names of all that `start` can call outside of `packages`; a method of an unknown value as `.name`."""
    outside: set[str] = set()
    seen: set[object] = set()
    waiting: list[tuple[Any, type | None]] = [(start, owner)]
    while waiting:
        function, cls = waiting.pop()
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        if isinstance(function, functools.partial):
            function = function.func
        if inspect.isclass(function):
            waiting += [(f, function) for f in vars(function).values() if inspect.isfunction(f)]
            continue
        if not inspect.isfunction(function) or (function, cls) in seen:
            continue
        seen.add((function, cls))
        tree = tree_of(function.__code__)
        assert tree is not None, f"no source of {function}"
        for target, name in _called(tree, function, cls):
            module = getattr(target, "__module__", None) or ""
            if (
                target is not None
                and module.split(".")[0] in packages
                and (inspect.isclass(target) or inspect.isfunction(inspect.unwrap(target)))
            ):
                bound = cls if name.startswith(("self.", "cls.", "super")) else None
                waiting.append((target, bound))
            else:
                outside.add(name if target is None else f"{module}.{getattr(target, '__qualname__', name)}".lstrip("."))
    return outside


def _called(tree: ast.AST, function: types.FunctionType, cls: type | None) -> Iterator[tuple[Any, str]]:
    """(what is named, its name) of each call, and of each function that is handed on by name."""
    scope: dict[str, Any] = dict(function.__globals__)
    if function.__closure__:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
            try:
                scope[name] = cell.cell_contents
            except ValueError:
                continue
    for node in ast.walk(tree):  # imports inside the function
        if isinstance(node, ast.Import):
            for alias in node.names:
                scope[alias.asname or alias.name.split(".")[0]] = importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                scope[alias.asname or alias.name] = getattr(importlib.import_module(node.module), alias.name, None)
    inner = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda)) and hasattr(n, "name")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = node.func
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in inner:
            named = node
            if not inspect.isroutine(scope.get(node.id, getattr(builtins, node.id, None))):
                continue
        else:
            continue
        name = ast.unparse(named)
        if isinstance(named, ast.Name) and named.id in inner:
            continue
        yield (
            _resolved(named, scope, cls),
            name
            if isinstance(named, (ast.Name, ast.Attribute))
            and len(name) < 60
            and _resolved(named, scope, cls) is not None
            else f".{named.attr}"
            if isinstance(named, ast.Attribute)
            else name,
        )


def _resolved(node: ast.AST, scope: dict[str, Any], cls: type | None) -> Any:
    if isinstance(node, ast.Name):
        if node.id in ("self", "cls") and cls is not None:
            return cls
        return scope.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        base = _resolved(node.value, scope, cls)
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super" and cls is not None:
            return next((vars(b)[node.attr] for b in cls.__mro__[1:] if node.attr in vars(b)), None)
        if base is not None and (inspect.ismodule(base) or inspect.isclass(base)):
            return getattr(base, node.attr, None)
    return None


_ = sys
