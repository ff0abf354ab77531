"""Every reason why a site is left alone is "cause; remedy": read off the source, so that a new one can't lack its."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import flash_inductor
from flash_inductor.matching.masks import REMEDY, Refusal

PACKAGE = Path(flash_inductor.__file__).parent
# What carries the reason of another, which was raised or returned with its remedy.
PASSED_ON = {
    "matching/mask_split.py: proof.reason",
    "matching/mask_split.py: Refusal(str(reason)).reason",
    "matching/emit_operands.py: reason",
    "matching/rewrite.py: ' '.join(reasons)",
    "matching/rewrite.py: unwanted",
    "matching/sites.py: both.reason",
}
# Functions that return a reason.
RETURNING = {"matching/scope.py": "left_out", "matching/operands.py": "obstacle"}


def text_of(node: ast.expr) -> str | None:
    """A literal's text, with {} for what is put in; None for an expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def choices(node: ast.expr) -> Iterator[ast.expr]:
    """Both sides of ``a if c else b``, else the expression itself."""
    if isinstance(node, ast.IfExp):
        yield from choices(node.body)
        yield from choices(node.orelse)
    else:
        yield node


def reasons_in(source: str, name: str) -> Iterator[ast.expr]:
    """The arguments of Refused(...), of reasons.append(...), and what functions of RETURNING return."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            literal = any(text_of(choice) is not None for choice in choices(node.args[0]))
            if called == "Refused" or (called == "reasons.append" and literal):
                yield from choices(node.args[0])
        elif isinstance(node, ast.FunctionDef) and node.name == RETURNING.get(name):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None and ast.unparse(inner.value) != "None":
                    yield from choices(inner.value)


def sources() -> list[Path]:
    return [PACKAGE / "support.py", *sorted((PACKAGE / "matching").glob("*.py"))]


def faults(source: str, name: str) -> list[str]:
    found = []
    for node in reasons_in(source, name):
        text = text_of(node)
        if text is None:
            if f"{name}: {ast.unparse(node)}" not in PASSED_ON:
                found.append(f"{name}:{node.lineno} can't be read: {ast.unparse(node)}")
        else:
            cause, _, remedy = text.partition("; ")
            if len(cause) < 10 or len(remedy) < 3:
                found.append(f"{name}:{node.lineno} has no remedy: {text}")
    return found


def test_every_reason_has_a_remedy() -> None:
    counted, found = 0, []
    for path in sources():
        name = path.relative_to(PACKAGE).as_posix()
        counted += sum(1 for _ in reasons_in(path.read_text(), name))
        found += faults(path.read_text(), name)
    assert not found
    assert counted > 120  # else the search misses a form


@pytest.mark.parametrize(
    "source",
    [
        'raise Refused("the scores are odd")',
        'raise Refused(f"the scores are {x}")',
        'raise Refused("the scores are odd; make them even" if x else "the scores are odd")',
        "raise Refused(words)",
        'reasons.append("the scores are odd")',
    ],
)
def test_the_search_can_fail(source: str) -> None:
    assert len(faults(source, "matching/sites.py")) == 1


def test_what_can_be_read_passes() -> None:
    assert not faults('raise Refused(f"the scores are {x}; " "make them even")', "matching/sites.py")


def test_refused_masks_have_a_remedy_of_their_own_or_the_general_one() -> None:
    assert Refusal("the mask is odd").reason == f"the mask is odd; {REMEDY}"
    assert Refusal("the mask is odd; make it even").reason == "the mask is odd; make it even"
