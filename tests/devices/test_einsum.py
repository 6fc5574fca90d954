"""`devices.einsum`: in a graph, a device node like any other; outside of graphs, JAX's einsum."""

from typing import Any

import jax
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine


def flops(fn: Any, *args: Any) -> float:
    """Returns the operations of a compiled function, by XLA's own analysis."""
    cost: Any = jax.jit(fn).lower(*args).compile().cost_analysis()
    return float(cost["flops"])


def test_outside_of_a_graph_it_is_jaxs() -> None:
    a = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(devices.einsum("ij->ji", a), a.T)
    np.testing.assert_allclose(devices.einsum("...j->...", a), a.sum(-1))


async def test_a_call_is_a_node_whose_products_are_in_the_best_order() -> None:
    @ps.graph
    async def power(a: Any, v: Any) -> Any:
        return devices.einsum("ij,jk,k->i", a, a, v)

    assert "einsum ij,jk,k->i" in str(power)
    (step,) = engine.plan(power).steps
    node: Any = step.head.callee
    n = 500
    a, v = np.random.default_rng(0).random((n, n), np.float32), np.ones(n, np.float32)
    assert flops(node.fn, a, a, v) <= 2e6
    np.testing.assert_allclose(await engine.run(power(a, v)), a @ (a @ v), rtol=1e-4)


async def test_it_is_fused_with_other_nodes_around_it() -> None:
    halved = ps.device_node(name="halved")(lambda x: x / 2)

    @ps.graph
    async def mixed(a: Any, b: Any) -> Any:
        return halved(devices.einsum("ij->", devices.einsum("ij,jk->ik", halved(a), b)))

    (step,) = engine.plan(mixed).steps
    assert step.label == "halved → einsum ij,jk->ik → einsum ij-> → halved"
    a = np.random.default_rng(0).random((3, 3))
    np.testing.assert_allclose(await engine.run(mixed(a, a)), (a @ a).sum() / 4, rtol=1e-5)


def test_subscripts_that_are_no_text_are_refused_with_the_line() -> None:
    @ps.graph
    async def symbolic(x: Any) -> Any:
        return devices.einsum(x, x)

    line = f"{__file__}:{symbolic.fn.__code__.co_firstlineno + 2}"
    with pytest.raises(ps.GraphTraceError, match="write them as text") as no:
        engine.plan(symbolic)
    assert str(no.value).startswith(line)


@pytest.mark.parametrize(
    ("subscripts", "name"), [("ij, jk", "ij,jk->ik"), ("ij, jk -> ki", "ij,jk->ki"), ("ii", "ii->")]
)
def test_snapshots_know_a_sum_by_its_written_out_subscripts(subscripts: str, name: str) -> None:
    @ps.graph
    async def summed(a: Any) -> Any:
        return devices.einsum(subscripts, *[a] * (subscripts.count(",") + 1))

    assert f"einsum {name}" in str(summed)


@pytest.mark.parametrize(
    ("subscripts", "told"),
    [("ii->i", "index 'i' has the lengths 1 and 5 in operand 1"), ("i?->i", r"'\?' is no index"), ("ij->ik", "k")],
)
async def test_subscripts_that_do_not_fit_are_refused(subscripts: str, told: str) -> None:
    @ps.graph
    async def diagonal(a: Any) -> Any:
        return devices.einsum(subscripts, a)

    with pytest.raises(ValueError, match=told) as no:
        await engine.run(diagonal(np.ones((1, 5), np.float32)))
    assert f"einsum {subscripts}" in "\n".join(no.value.__notes__)
