"""What a function can call: its source, the sources of what it calls, and so on through the packages that are walked.

Names are found as Python finds them: globals of the module, what an enclosing function holds, imports inside the function,
attributes of modules, classes and `self`. A method of a value of unknown class is every function of that name in the modules
that `near` names, and counts by its name. So more is found than can happen, and nothing less.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any


def reached(
    start: Callable[..., Any], packages: tuple[str, ...], owner: type | None = None, near: str = ""
) -> set[str]:
    """Dotted names of what `start` (of the class `owner`) can call outside of `packages`; a method of any value as `.name`."""
    outside: set[str] = set()
    seen: set[object] = set()
    waiting: list[tuple[Any, type | None]] = [(start, owner)]
    while waiting:
        function, cls = waiting.pop()
        cls = function.__self__ if inspect.ismethod(function) and inspect.isclass(function.__self__) else cls
        function = inspect.unwrap(getattr(function, "__func__", function))
        if inspect.isclass(function):
            waiting += [(f, function) for f in vars(function).values() if inspect.isroutine(f)]
            continue
        if not inspect.isfunction(function) or (function, cls) in seen:
            continue
        if function.__code__.co_filename.startswith("<"):  # a dataclass's own, made when its module is imported
            continue
        seen.add((function, cls))
        for target, name, bound in called(function, cls):
            module = getattr(target, "__module__", None) or ""
            if target is None:
                outside.add(name)
                waiting += [(f, c) for f, c in functions_near(near, name)]
            elif module.split(".")[0] in packages and (inspect.isclass(target) or inspect.isroutine(target)):
                waiting.append((target, bound))
            else:
                outside.add(f"{module}.{getattr(target, '__qualname__', name)}")
    return outside


def functions_near(near: str, name: str) -> Iterator[tuple[Any, type]]:
    """Methods called `name` (with a dot before it) of classes in the modules that begin with `near`."""
    for module_name, module in list(sys.modules.items()):
        if near and module_name.startswith(near):
            for cls in vars(module).values():
                if (
                    inspect.isclass(cls)
                    and cls.__module__ == module_name
                    and inspect.isroutine(vars(cls).get(name[1:]))
                ):
                    yield vars(cls)[name[1:]], cls


def called(function: types.FunctionType, cls: type | None) -> Iterator[tuple[Any, str, type | None]]:
    """(what it is, its name, the class of its `self`) of each call in a function, and of each function that it hands on."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    scope: dict[str, Any] = {**vars(builtins), **function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                scope[alias.asname or alias.name.split(".")[0]] = importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                scope[alias.asname or alias.name] = getattr(importlib.import_module(node.module), alias.name, None)
    inner = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named: ast.AST = node.func
        elif isinstance(node, ast.Name) and inspect.isroutine(scope.get(node.id)):
            named = node  # a function that is handed on, or called
        else:
            continue
        if isinstance(named, ast.Name) and named.id in inner:
            continue
        found = resolved(named, scope, cls)
        of_self = (
            isinstance(named, ast.Attribute) and isinstance(named.value, ast.Name) and named.value.id in ("self", "cls")
        )
        of_super = isinstance(named, ast.Attribute) and isinstance(named.value, ast.Call)
        name = f".{named.attr}" if isinstance(named, ast.Attribute) else ast.unparse(named)
        yield found, name, cls if of_self or of_super else None


def resolved(node: ast.AST, scope: dict[str, Any], cls: type | None) -> Any:
    if isinstance(node, ast.Name):
        return cls if node.id in ("self", "cls") and cls is not None else scope.get(node.id)
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super" and cls is not None:
            return next((getattr(base, node.attr) for base in cls.__mro__[1:] if hasattr(base, node.attr)), None)
        base = resolved(node.value, scope, cls)
        if inspect.ismodule(base) or inspect.isclass(base):
            return getattr(base, node.attr, None)
    return None
