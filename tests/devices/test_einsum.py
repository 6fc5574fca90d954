"""`devices.einsum`: in a graph, nodes that are merged into the cheapest order; outside of graphs, NumPy's einsum."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import devices, engine
from penstock.devices import contraction
from penstock.devices.contraction import Contraction, Subscripts
from tests.conftest import EFFORT


def flops(fn: Any, *args: Any) -> float:
    """Returns the operations of a compiled function, by XLA's own analysis."""
    cost: Any = jax.jit(fn).lower(*args).compile().cost_analysis()
    return float(cost["flops"])


def test_outside_of_a_graph_it_is_jaxs() -> None:
    a = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(devices.einsum("ij->ji", a), a.T)
    np.testing.assert_allclose(devices.einsum("...j->...", a), a.sum(-1))


async def test_a_call_is_a_node_and_neighbours_are_one_sum_in_the_best_order() -> None:
    @ps.graph
    async def power(a: Any, v: Any) -> Any:
        squared = devices.einsum("ij,jk->ik", a, a)
        return devices.einsum("ik,k->i", squared, v)

    assert "einsum ij,jk->ik" in str(power)
    (step,) = engine.plan(power).steps
    assert step.label == "einsum ij,jk->ik → einsum ik,k->i"
    n = 500
    a, v = np.random.default_rng(0).random((n, n), np.float32), np.ones(n, np.float32)
    region: Any = step.head.callee
    assert list(region._parameters) == ["operand_1", "operand_2"]
    assert flops(region.fn, a, v) <= 2e6
    assert flops(lambda a, v: (a @ a) @ v, a, v) > 200e6
    np.testing.assert_allclose(await engine.run(power(a, v)), a @ (a @ v), rtol=1e-4)


async def test_it_is_fused_with_other_nodes_around_it() -> None:
    @ps.device_node
    def halved(x: Any) -> Any:
        return x / 2

    @ps.graph
    async def mixed(a: Any, b: Any) -> Any:
        return halved(devices.einsum("ij->", devices.einsum("ij,jk->ik", halved(a), b)))

    (step,) = engine.plan(mixed).steps
    assert step.label == "halved → einsum ij,jk->ik → einsum ij-> → halved"
    a = np.random.default_rng(0).random((3, 3))
    np.testing.assert_allclose(await engine.run(mixed(a, a)), (a @ a).sum() / 4, rtol=1e-5)


def test_what_is_read_twice_is_computed_once() -> None:
    @ps.graph
    async def twice(a: Any) -> Any:
        squared = devices.einsum("ij,jk->ik", a, a)
        return devices.einsum("ij,ji->", squared, squared)

    (step,) = engine.plan(twice).steps
    a = np.ones((64, 64), np.float32)
    region: Any = step.head.callee
    assert flops(region.fn, a) < 1.2 * flops(lambda a: a @ a, a)


@pytest.mark.parametrize(
    ("subscripts", "operands", "message"),
    [
        ("ij,jk->ik", 1, "the subscripts are for 2 operands, and 1 operand given"),
        ("ij;jk->ik", 2, "';' in 'ij;jk' is no index"),
        ("ij->ijk", 1, "the result has the index 'k', and no operand has it"),
        ("ij->ii", 1, "the result has the index 'i' twice"),
        ("i->...i", 1, 'the result has "...", and no operand has it'),
        ("i....->i", 1, "'.' in 'i....' is no index"),
        ("i->i->i", 1, "'-' in 'i->i' is no index"),
        (("i", "j"), 1, "write them as text"),
    ],
)
def test_malformed_subscripts_are_refused_with_the_line(subscripts: Any, operands: int, message: str) -> None:
    @ps.graph
    async def malformed(x: Any) -> Any:
        return devices.einsum(subscripts, *[x] * operands)

    line = "|".join(re.escape(f"{__file__}:{number}") for number in [malformed_line(malformed)])
    with pytest.raises(ps.GraphTraceError, match=f"^{line}.*{re.escape(message)}"):
        engine.plan(malformed)


def malformed_line(graph: Any) -> int:
    return int(graph.__wrapped__.__code__.co_firstlineno) + 2


async def test_shapes_that_do_not_fit_are_named_with_the_node() -> None:
    @ps.graph
    async def wrong(a: Any, b: Any) -> Any:
        return devices.einsum("ik->", devices.einsum("ij,jk->ik", a, b))

    with pytest.raises(
        ValueError, match=r"einsum ij,jk->ik: index 'j' has the lengths 3 and 4.* \[2, 3\], \[4, 2\]"
    ) as no:
        await engine.run(wrong(np.ones((2, 3)), np.ones((4, 2))))
    assert "einsum ij,jk->ik → einsum ik->" in "\n".join(no.value.__notes__)
    with pytest.raises(ValueError, match=r"operand 1 has 1 axes, and 'ij' names 2"):
        await engine.run(wrong(np.ones(2), np.ones((2, 2))))


def test_what_would_not_be_the_same_sum_is_computed_as_written() -> None:
    outer = Contraction(
        Subscripts.parse("ij,j->i", 2), (Contraction(Subscripts.parse("ij,jk->ik", 2), (None, None)), None)
    )
    draw = np.random.default_rng(0)
    # Values are converted between the two sums: sums of bytes wrap around, sums of floats do not.
    small, v = draw.integers(-100, 100, (8, 8), np.int8), draw.random(8, np.float32)
    wrapped = np.einsum("ij,jk->ik", small, small)
    np.testing.assert_allclose(outer(small, small, v), wrapped.astype(np.float32) @ v, rtol=1e-4, atol=1e-3)
    # An axis of length 1 that is broadcast.
    one, three = draw.random((2, 1), np.float32), draw.random((3, 4), np.float32)
    right = np.einsum("ij,jk->ik", np.broadcast_to(one, (2, 3)), three)
    np.testing.assert_allclose(outer(one, three, v[:4]), right @ v[:4], rtol=1e-5)
    assert bool(jnp.all(outer(small, small, small[0]) == np.einsum("ij,j->i", wrapped, small[0])))


def test_the_diagonal_of_a_broadcast_array_is_that_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    # Search for an order whatever it costs. As one sum, the two would give the diagonal of the row.
    monkeypatch.setattr(contraction, "_path", lambda text, shapes, *_: contraction._search(text, shapes)[0])
    scaled = Contraction(Subscripts.parse("ij,i->ij", 2), (None, None))
    trace = Contraction(Subscripts.parse("ii->", 1), (scaled,))
    row, weights = np.array([[1, 2, 3]], np.float32), np.array([1, 10, 100], np.float32)
    assert float(trace(row, weights)) == np.trace(row * weights[:, None])
    with pytest.raises(ValueError, match="index 'i' has the lengths 1 and 3 in operand 1"):
        Contraction(Subscripts.parse("ii->", 1), (None,))(row)


def test_an_ellipsis_is_computed_by_itself() -> None:
    inner = Contraction(Subscripts.parse("...i,i->...", 2), (None, None))
    outer = Contraction(Subscripts.parse("ab->a", 1), (inner,))
    x, w = np.random.default_rng(0).random((3, 4, 5)), np.ones(5)
    np.testing.assert_allclose(outer(x, w), x.sum((1, 2)), rtol=1e-5)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Contraction, list[tuple[int, ...]]]:
    """A random tree of einsums, and the shapes of its operands."""
    sizes = [2, 3, 4]
    shapes: list[tuple[int, ...]] = []

    def tree(wanted: tuple[int, ...], depth: int) -> Contraction | None:
        """Returns an einsum whose result has this shape; None for an operand."""
        if not depth or not draw(st.integers(0, 3)):
            shapes.append(wanted)
            return None
        letters = draw(st.permutations("abcdefgh"))
        output = "".join(letters[: len(wanted)])
        size_of = dict(zip(output, wanted, strict=True))
        size_of.update({letter: draw(st.sampled_from(sizes)) for letter in letters[len(wanted) : len(wanted) + 2]})
        terms = ["".join(draw(st.lists(st.sampled_from(sorted(size_of)), max_size=3))) if size_of else ""]
        terms += ["".join(draw(st.lists(st.sampled_from(sorted(size_of)), max_size=2))) if size_of else ""]
        missing = "".join(letter for letter in output if letter not in "".join(terms))
        terms = [term for term in [*terms, missing] if term] or [""]
        inner = tuple([tree(tuple([size_of[letter] for letter in term]), depth - 1) for term in terms])
        return Contraction(Subscripts(tuple(terms), output), inner)

    made = tree(tuple(draw(st.lists(st.sampled_from(sizes), max_size=2))), 3)
    if made is None:
        made = Contraction(Subscripts.parse(f"{'ab'[: len(shapes[0])]}->", 1), (None,))
    return made, shapes


def with_numpy(tree: Contraction, arrays: list[Any]) -> Any:
    own = [arrays.pop(0) if inner is None else with_numpy(inner, arrays) for inner in tree.inner]
    return np.einsum(str(tree.subscripts), *own)


@settings(max_examples=15 * EFFORT)
@given(chain=chains(), seed=st.integers(0, 99))
def test_merged_einsums_compute_what_numpys_do_one_by_one(
    chain: tuple[Contraction, list[tuple[int, ...]]], seed: int
) -> None:
    tree, shapes = chain
    draw = np.random.default_rng(seed)
    arrays = [np.asarray(draw.random(shape), np.float32) + 0.1 for shape in shapes]
    right = with_numpy(tree, [array.astype(np.float64) for array in arrays])
    with pytest.MonkeyPatch.context() as patch:
        for always in (False, True):  # the merged order, also where the order as written costs less
            if always:
                patch.setattr(contraction, "_path", lambda text, shapes, *_: contraction._search(text, shapes)[0])
            result = tree(*arrays)
            assert result.shape == right.shape
            np.testing.assert_allclose(result, right, rtol=1e-4)
