"""Writes what docstrings and signatures say into the pages of the reference: `python docs/reference/render.py`.

A page has a comment for each public name, with the members of a class that are to be shown. What stands behind it, up
to the empty comment, is made from the sources, which are read and not imported. The rest of a page is written by hand,
the examples too: `tests/docs` runs them, and `tests/house` compares the pages with the sources.

    <!-- ::: penstock.Resource: open -->
    ...
    <!-- ::: -->
"""

import ast
import builtins
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from inspect import cleandoc
from pathlib import Path
from textwrap import indent

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
MARKED = re.compile(
    r"^<!-- ::: (?P<name>[\w.]+)(?:: (?P<members>[\w, ]+))? -->\n(?:(?:(?!<!-- ::: \w).)*?^<!-- ::: -->\n)?",
    re.MULTILINE | re.DOTALL,
)
SECTIONS = {"Args": "Takes", "Attributes": "Attributes", "Returns": "Returns", "Yields": "Yields", "Raises": "Raises"}
WIDTH = 100

Function = ast.FunctionDef | ast.AsyncFunctionDef


def rendered(page: str) -> str:
    """Returns a page with what the sources say now."""

    def block(marked: re.Match[str]) -> str:
        members = marked["members"] or ""
        level = 3 if "\n## " in MARKED.sub("", page[: marked.start()]) else 2
        text = "\n\n".join(_of(marked["name"], members.split(", ") if members else [], "#" * level))
        return f"<!-- ::: {marked['name']}{members and f': {members}'} -->\n\n{text}\n\n<!-- ::: -->\n"

    return MARKED.sub(block, page)


def _of(name: str, members: list[str], level: str) -> Iterator[str]:
    path, found, before = _found(SOURCE / "__init__.py", name.split(".")[1:])
    match found:
        case ast.Module():
            yield from _documentation(found)
            if name == "penstock.telemetry.names":  # nothing but constants, in groups
                text = path.read_text().partition('"""\n\n')[2]
                yield f"```pyi\n{text}```"
            return
        case ast.ClassDef():
            yield f"{level} `{name}`"
            yield f"```pyi\n{_class(path, found)}\n```"
            yield from _documentation(found)
            for member in members:
                functions, attribute = _member(path, found, member)
                if functions:
                    yield f"{level}# `{found.name}.{member}`"
                    yield f"```pyi\n{_overloads(path, functions)}\n```"
                    yield from [same] if (same := _same(name, functions[-1])) else _documentation(functions[-1])
                else:
                    assert attribute, f"{name} has no {member}"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield f"{level} `{name}`"
            yield f"```pyi\n{_overloads(path, [*before, found])}\n```"
            yield from _documentation(found)
        case ast.Assign() | ast.AnnAssign():
            yield f"{level} `{name}`"
            yield f"```pyi\n{_quotes(ast.unparse(found))}\n```"
            if before:
                yield cleandoc(ast.literal_eval(before[0]))


def _same(kind: str, method: Function) -> str:
    """Returns what a page says of a method that is a function of the package as well."""
    function = f"{kind.rpartition('.')[0]}.{method.name}"
    if function in _documented():
        found = _found(SOURCE / "__init__.py", function.split(".")[1:])[1]
        if ast.get_docstring(found) == ast.get_docstring(method):
            return f"Does what `{function}` does, in this `{kind.rpartition('.')[2]}`."
    return ""


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _found(path: Path, names: list[str]) -> tuple[Path, ast.AST, list]:
    """Returns the definition of a name in a file, or in the file that it imports it from.

    Also its overloads, if it is a function, or the string behind it, if it is a constant.
    """
    if not names:
        return path, _tree(path), []
    if (submodule := _module(path.parent, names[0])) and path.name == "__init__.py":
        return _found(submodule, names[1:])
    before: list = []
    body = list(_statements(_tree(path).body))
    for statement, behind in zip(body, [*body[1:], None], strict=True):
        match statement:
            case ast.ImportFrom(module=module, level=level) if level:
                for alias in statement.names:
                    if (alias.asname or alias.name) == names[0]:
                        target = _module(path.parents[level - 1], *(module or alias.name).split("."))
                        return _found(target, [alias.name] if module else [])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name == names[0]:
                if not _is_overload(statement):
                    return path, statement, before
                before.append(statement)
            case ast.ClassDef(name=name) if name == names[0]:
                return path, statement, []
            case ast.Assign(targets=[ast.Tuple(elts=found)]) if names[0] in map(ast.unparse, found):
                where, kind, _ = _found(path, ["Engine"])  # it is a method of that
                *before, function = map(_bound, _member(where, kind, names[0])[0])
                return where, function, before
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if name == names[0]:
                said = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
                return path, statement, [behind.value] if said else []
    raise LookupError(f"{path} has no {'.'.join(names)}")


def _bound(method: Function) -> Function:
    """Returns a method as it is called: without `self`."""
    bound = deepcopy(method)
    arguments = bound.args.posonlyargs or bound.args.args
    del arguments[0]
    return bound


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements([*statement.body, *statement.orelse])


def _module(folder: Path, *names: str) -> Path | None:
    place = folder.joinpath(*names)
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)


def _bases(path: Path, kind: ast.ClassDef) -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yields a class, then its bases in this package, with the files that have them."""
    yield path, kind
    for base in kind.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        try:
            where, found, _ = _found(path, ast.unparse(name).split(".")[-1:])
        except LookupError:
            continue
        if isinstance(found, ast.ClassDef):
            yield from _bases(where, found)


def _member(path: Path, kind: ast.ClassDef, name: str) -> tuple[list[Function], ast.AnnAssign | None]:
    """Returns the functions of a class that have this name, overloads first, or its annotation."""
    for _, base in _bases(path, kind):
        functions = [one for one in base.body if isinstance(one, Function) and one.name == name]
        assigned = [one for method in base.body if isinstance(method, Function) for one in ast.walk(method)]
        for one in [*base.body, *(one for one in assigned if not isinstance(getattr(one, "target", None), ast.Name))]:
            match one:
                case ast.AnnAssign(target=ast.Name(id=found) | ast.Attribute(attr=found)) if found == name:
                    return functions, one
        if functions:
            return functions, None
    return [], None


def _class(path: Path, kind: ast.ClassDef) -> str:
    """Returns a stub of a class: its fields that are documented, and how it is made."""
    sections = dict(_sections(kind))
    bases = [base for base in kind.bases if _is_public(base)]
    lines = [f"@{_quotes(ast.unparse(one))}" for one in kind.decorator_list if "dataclass" in ast.unparse(one)]
    lines.append(f"class {kind.name}{'(' * bool(bases)}{', '.join(map(ast.unparse, bases))}{')' * bool(bases)}:")
    body = []
    made = _member(path, kind, "__init__")[0]
    for name, _ in [*_items(sections.get("Args", "")), *_items(sections.get("Attributes", ""))]:
        functions, field = _member(path, kind, name)
        if field is not None and not (made and name in dict(_items(sections.get("Args", "")))):
            value = f" = {_value(field.value)}" if isinstance(field.target, ast.Name) and field.value else ""
            body.append(f"{name}: {_annotation(field.annotation)}{value}")
        elif functions and functions[-1].returns is not None:
            body.append(f"{name}: {_annotation(functions[-1].returns)}")
    if "Args" in sections and made:
        body.append(_overloads(path, made))
    if not body:
        return "\n".join(lines) + " ..."
    return "\n".join([*lines, indent("\n".join(body), "    ")])


def _is_public(base: ast.expr) -> bool:
    name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
    documented = {known.rpartition(".")[2] for known in _documented()}
    return hasattr(builtins, name) or name in documented or name in ("NamedTuple", "TypedDict", "Protocol", "ABC")


@cache
def _documented() -> set[str]:
    return {marked["name"] for page in HERE.glob("*.md") for marked in MARKED.finditer(page.read_text())}


def _is_overload(function: Function) -> bool:
    return any(ast.unparse(one) == "overload" for one in function.decorator_list)


def _overloads(path: Path, functions: list[Function]) -> str:
    """Returns the overloads of a function if there are a few, and else what it takes all in all."""
    overloads = [one for one in functions if _is_overload(one)]
    shown = overloads if 0 < len(overloads) <= 4 else functions[-1:]
    return "\n".join(_signature(path, one) for one in shown)


def _keywords(path: Path, found: ast.arg) -> Iterator[str]:
    """Yields the keyword arguments of a function with `**options: Unpack[...]`, as far as no page has their class."""
    match found.annotation:
        case ast.Subscript(value=ast.Name("Unpack"), slice=ast.Name(name) | ast.Subscript(value=ast.Name(name))):
            where, kind, _ = _found(path, [name])
            if isinstance(kind, ast.ClassDef) and not _is_public(ast.Name(name)):
                fields = [one for one in kind.body if isinstance(one, ast.AnnAssign)]
                own = [f"{ast.unparse(one.target)}: {_annotation(one.annotation)} = ..." for one in fields]
                base, others = kind.bases[0], list[str]()
                if isinstance(base, ast.Name) and base.id != "TypedDict":
                    others = [*_keywords(where, ast.arg(found.arg, ast.Subscript(ast.Name("Unpack"), base)))]
                yield from sorted([*others, *own], key=lambda keyword: keyword.startswith("**"))
                return
    yield f"**{_parameter(found, None)}"


def _signature(path: Path, function: Function) -> str:
    found = function.args
    positional = [*found.posonlyargs, *found.args]
    defaults = [None] * (len(positional) - len(found.defaults)) + found.defaults
    parameters = [_parameter(one, value) for one, value in zip(positional, defaults, strict=True)]
    if found.posonlyargs:
        parameters.insert(len(found.posonlyargs), "/")
    keywords = [*_keywords(path, found.kwarg)] if found.kwarg else []
    if found.vararg:
        parameters.append(f"*{_parameter(found.vararg, None)}")
    elif found.kwonlyargs or (keywords and not keywords[0].startswith("**")):
        parameters.append("*")
    parameters += [_parameter(one, value) for one, value in zip(found.kwonlyargs, found.kw_defaults, strict=True)]
    parameters += keywords
    kept = ("property", "classmethod", "staticmethod", "asynccontextmanager", "contextmanager")
    decorators = [f"@{name}\n" for one in function.decorator_list if (name := ast.unparse(one)) in kept]
    start = f"{''.join(decorators)}{'async ' * isinstance(function, ast.AsyncFunctionDef)}def {function.name}("
    end = f"){f' -> {_annotation(function.returns)}' if function.returns else ''}: ..."
    line = f"{start}{', '.join(parameters)}{end}"
    if len(line.rpartition("\n")[2]) <= WIDTH:
        return line
    return start + "\n" + "".join(f"    {one},\n" for one in parameters) + end


def _parameter(found: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {_annotation(found.annotation)}" if found.annotation else ""
    if default is None:
        return f"{found.arg}{annotation}"
    return f"{found.arg}{annotation}{' = ' if annotation else '='}{_value(default)}"


def _value(value: ast.expr) -> str:
    """Returns a default as it is written, if it says something to a reader."""
    match value:
        case ast.Call(func=ast.Name(id="field")):
            return "..."
        case ast.Name(id=name) | ast.Attribute(attr=name) if name.startswith("_") or name.isupper():
            return "..."
    return _quotes(ast.unparse(value))


def _annotation(annotation: ast.expr) -> str:
    """Returns an annotation without the quotes around names that are not known yet."""

    class Unquoted(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            return node if ast.unparse(node.value) == "Literal" else self.generic_visit(node)

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return self.visit(ast.parse(node.value, mode="eval").body) if isinstance(node.value, str) else node

    return _quotes(ast.unparse(Unquoted().visit(deepcopy(annotation))))


def _quotes(code: str) -> str:
    return re.sub(r"'([^'\"\\]*)'", r'"\1"', code)


def _documentation(found: ast.Module | ast.ClassDef | Function) -> Iterator[str]:
    """Yields the parts of a docstring as Markdown."""
    for title, text in _sections(found):
        if not title:
            yield text
        elif items := _items(text):
            yield f"{SECTIONS[title]}:\n\n" + "\n".join(f"- `{name}`: {said}" for name, said in items)
        else:
            yield f"{SECTIONS[title]}: {text}"


def _sections(found: ast.Module | ast.ClassDef | Function) -> list[tuple[str, str]]:
    """Returns the description of a docstring under an empty title, and its sections under theirs."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", ast.get_docstring(found) or "", flags=re.MULTILINE)
    titles = ["", *parts[1::2]]
    texts = [parts[0].strip(), *(cleandoc(f"\n{text}").strip() for text in parts[2::2])]
    return [(title, text) for title, text in zip(titles, texts, strict=True) if text]


def _items(text: str) -> list[tuple[str, str]]:
    """Returns the names and texts of a section; none if the section is a sentence."""
    found = re.split(r"^(\*{0,2}[\w.]+): ", text, flags=re.MULTILINE)
    return (
        [(name, re.sub(r"\n +", "\n  ", said.rstrip())) for name, said in zip(found[1::2], found[2::2], strict=True)]
        if not found[0]
        else []
    )


if __name__ == "__main__":
    for page in sorted(HERE.glob("*.md")):
        page.write_text(rendered(page.read_text()))
