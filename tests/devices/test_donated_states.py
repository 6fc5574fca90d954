"""The state of a loop whose step says `donate=True`: the next state overwrites it, and no other reader is affected."""

import asyncio
import dataclasses
import functools
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import data, engine
from tests.kit import plain

from .gates import Gate
from .kit import graph_of, on_the_host

NUMBERS = [np.float32(number) for number in (3, 1, 4, 1, 5)]


def scaled_and_more(total: Any, x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 1.5 + x, total)


def step_of(donate: bool = True, **options: Any) -> Any:
    return ps.device_node(**{"device": "cpu", "donate": donate, "name": "step", **options})(scaled_and_more)


@ps.node
async def numbers(count: int) -> AsyncIterator[Any]:
    for number in (NUMBERS * count)[:count]:
        yield number


is_small = ps.device_node(device="cpu", name="is_small")(lambda total: jax.tree.leaves(total)[0].sum() < 1000)
size = ps.device_node(device="cpu")(lambda total: sum(leaf.sum() for leaf in jax.tree.leaves(total)))


def seen_by(seen: list[Any]) -> Any:
    """Returns a node on the event loop that notes the state, so that a test can ask whether the state was deleted."""

    @ps.node(effectful="unordered")
    async def look(total: Any) -> float:
        seen.append(total)
        return float(sum(leaf.sum() for leaf in jax.tree.leaves(total)))

    return look


def folded(body: Callable[[Any, Any], Any], **options: Any) -> Any:
    return graph_of(lambda total: ps.fold(body, numbers(5), total, **options), awaits=True)


def looped(body: Callable[[Any, Any], Any], predicate: Any = is_small, **options: Any) -> Any:
    def turn(total: Any) -> Any:
        return body(total, np.float32(7))

    return graph_of(lambda total: ps.while_loop(predicate, turn, total, **options), awaits=True)


LOOPS: dict[str, Callable[..., Any]] = {"fold": folded, "while_loop": looped}


def bits(value: Any) -> list[Any]:
    return [(np.asarray(leaf).dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(value)]


def shown(step: Any, look: Any) -> Any:
    """Returns a body whose next states a node looks at."""

    async def body(total: Any, x: Any) -> Any:
        new = step(total, x)
        await look(new)
        return new

    return body


def is_gone(state: Any) -> bool:
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))


def noted(graph: Any) -> str:
    """Returns the lines of the plan about donation."""
    lines = str(engine.plan(graph)).splitlines()
    first = next((index for index, line in enumerate(lines) if line.startswith("  donation")), len(lines))
    return "\n".join(lines[first : first + 2])


INITIAL: dict[str, Callable[[], Any]] = {
    "an array of JAX": lambda: jnp.arange(8.0),
    "a weak one": lambda: jnp.asarray(2.0),
    "an array of NumPy": lambda: np.arange(8, dtype=np.float32),
    "a tree": lambda: {"a": jnp.ones(4), "b": (jnp.zeros(2), np.ones(2, np.float32))},
    "a number": lambda: 2.0,
    "one array twice": lambda: (jnp.ones(4),) * 2,
    "one on another device": lambda: jax.device_put(jnp.ones(4), jax.devices("cpu")[3]),
}


@pytest.mark.several_devices
@pytest.mark.parametrize("initial", INITIAL)
@pytest.mark.parametrize("kind", ["fold", pytest.param("while_loop", marks=pytest.mark.long)])
async def test_a_loop_writes_over_its_state_and_leaves_that_of_the_caller(kind: str, initial: str) -> None:
    given, results = INITIAL[initial](), []
    before = bits(given)
    for donate in (False, True):
        seen = list[Any]()
        results.append(await engine.run(LOOPS[kind](shown(step_of(donate), seen_by(seen)))(given)))
        assert len(seen) > 3
        assert [*map(is_gone, seen)] == [donate] * (len(seen) - 1) + [False]
    assert bits(results[0]) == bits(results[1])
    assert bits(given) == before
    assert not is_gone(given)


async def test_the_memory_is_reused_by_a_program_that_is_compiled_before_the_first_call() -> None:
    step = step_of(sample_input=(np.zeros(1000, np.float32), np.float32(0)))
    graph = folded(step)
    service: Any
    async with engine.deploy(graph, warmup=True) as service:
        assert step.compile_statistics().programs == 1
        await service(np.ones(1000, np.float32))
    assert step.compile_statistics().programs == 1
    report = await engine.memory(graph(jnp.zeros(1000)))
    assert [program.reused_bytes for node in report.nodes for program in node.programs] == [4000]
    assert "step in of/step writes the next state over the one before" in noted(graph)


async def test_an_array_that_stands_twice_in_the_state_is_copied_once() -> None:
    seen, results = list[Any](), []
    look = seen_by(seen)
    for donate in (False, True):
        step = ps.device_node(device="cpu", donate=donate)(lambda total, x: (total[0] * 1.5 + x, total[1] + 1))

        async def body(total: Any, x: Any, step: Any = step) -> Any:
            await look(total)
            new = step(total, x)
            return new[0], new[0]

        results.append(await engine.run(folded(body)((jnp.ones(4), jnp.ones(4)))))
    assert bits(results[0]) == bits(results[1])
    assert [*map(is_gone, seen)] == [False] * 6 + [True] * 4


@dataclasses.dataclass
class Told:
    states: Any
    largest: float


def told_by(largest: bool, **options: Any) -> Any:
    async def tell(total: Any) -> None:
        found = [jnp.max(leaf) for leaf in jax.tree.leaves(total)]
        await ps.emit(found[0] if largest else Told({"all": [total]}, float(found[0])))

    def tell_in_thread(total: Any) -> None:
        ps.emit(Told([total], 0.0))

    return ps.node(effectful="unordered", **options)(tell_in_thread if options else tell)


@pytest.mark.parametrize("options", [{}, {"runs_on": "thread"}])
@pytest.mark.parametrize("kind", LOOPS)
async def test_what_is_emitted_can_be_read_after_the_loop(kind: str, options: dict[str, Any]) -> None:
    tell, step, results = told_by(False, **options), step_of(), list[Any]()
    plain = step_of(donate=False)

    async def body(total: Any, x: Any, step: Any = step) -> Any:
        tell(total) if options else await tell(total)
        new = step(total, x)
        tell(new) if options else await tell(new)
        return new

    given = jnp.ones(4)
    for one in (step, plain):
        graph = LOOPS[kind](functools.partial(body, step=one))
        async with engine.stream(graph(given), events=Told, capacity=100) as stream:
            events = [event.value async for event in stream]
            told = sorted(map(bits, [event.states for event in events]))  # two threads may emit in either order
            results.append([*told, bits(await stream.result())])
    assert len(results[0]) > 8
    assert results[0] == results[1]


async def test_an_event_of_another_array_does_not_keep_the_state() -> None:
    seen: list[Any] = []
    look, tell = seen_by(seen), told_by(True)

    async def look_and_tell(new: Any) -> None:
        await look(new)
        await tell(new)

    call = folded(shown(step_of(), look_and_tell))(jnp.ones(4))
    assert len([event async for event in engine.stream(call, events=object, capacity=100)]) == 5
    assert [*map(is_gone, seen)] == [True] * 4 + [False]


async def test_all_other_readers_have_read_before_the_state_goes() -> None:
    @ps.node(effectful="unordered")
    async def slow(total: Any) -> None:
        for _ in range(2000):  # far more turns of the event loop than the device needs
            await asyncio.sleep(0)
        read.append(float(total.sum()))

    @ps.node(runs_on="thread", effectful="unordered")
    def in_thread(total: Any) -> None:
        read.append(float(np.asarray(total).sum()))

    async def twice_by_node(total: Any) -> None:
        await slow(total)
        in_thread(total)

    readers: list[Callable[[Any], Any]] = [
        lambda total: ps.cond(plain(0), slow, slow, total),
        lambda total: ps.map_each(lambda _: slow(total), [1, 2]),
        twice_by_node,
    ]
    for reads in readers:
        results = []
        for donate in (False, True):
            step, read = step_of(donate), list[float]()

            async def body(total: Any, x: Any, reads: Any = reads, step: Any = step) -> Any:
                await reads(total)
                return step(total, x)

            results.append((bits(await engine.run(folded(body)(jnp.ones(4)))), sorted(read)))
        assert results[0] == results[1]
        assert len(results[0][1]) in (5, 10)


added_to = ps.device_node(device="cpu", name="added_to")(lambda x, total: x + total.sum())


@ps.node
async def twice(value: Any) -> AsyncIterator[Any]:
    yield value
    yield value


NOT_MADE = "the next state is not made by device nodes alone"


async def is_not_made(step: Any, total: Any, x: Any) -> Any:
    step(total, x)
    return x


async def is_read_by_a_stream(step: Any, total: Any, x: Any) -> Any:
    found = await ps.fold(added_to, twice(total), x)
    return step(total, found)


async def is_not_made_by_one_branch(step: Any, total: Any, x: Any) -> Any:
    new = step(total, x)
    return await ps.cond(is_small(new), lambda new: x, lambda new: new, new)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda step, total, x: added_to(step(total, x), total), "added_to reads it later"),
        (lambda step, total, x: step(total[0], x), "it takes a part of it, or takes it twice"),
        (lambda step, total, x: (step(total, x), total), NOT_MADE),
        (lambda step, total, x: plain(step(total, x)), NOT_MADE),
        (is_not_made, NOT_MADE),
        (is_read_by_a_stream, "the stream of twice may read it later"),
        (is_not_made_by_one_branch, NOT_MADE),
    ],
)
async def test_a_plan_says_why_a_state_is_not_overwritten(body: Any, reason: str) -> None:
    step = step_of(pure=False)
    assert f"step in of/each does not overwrite the state: {reason}" in noted(
        folded(functools.partial(body, step), name="each")
    )


def test_nothing_is_said_of_donation_where_no_node_asks_for_it() -> None:
    for graph in (folded(step_of(donate=False)), folded(step_of(batch=ps.Batch(4)))):
        assert noted(graph) == ""


async def test_a_state_that_both_branches_make_is_overwritten() -> None:
    step, seen = step_of(), list[Any]()
    look = seen_by(seen)

    async def body(total: Any, x: Any) -> Any:
        new = step(total, x)
        new = await ps.cond(is_small(new), lambda new: step_of(donate=False)(new, x), lambda new: new, new)
        await look(new)
        return new

    assert float((await engine.run(folded(body)(jnp.ones(4))))[0]) > 0
    assert [*map(is_gone, seen)] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("node", "loop", "option"), [({"retry": ps.Retry(2)}, {}, "retry="), ({}, {"on_error": "skip"}, "on_error=")]
)
def test_what_needs_the_state_again_is_refused_when_it_is_planned(node: Any, loop: Any, option: str) -> None:
    graph = folded(step_of(**node), **loop)
    message = f"it overwrites the state of a fold, and {option} would need that after a failure; leave out one of both"
    with pytest.raises(ps.PlanError, match=f"test_donated_states.py:.*node 'step' has donate=True, so {message}"):
        engine.plan(graph)


def failing_at(number: int) -> Any:
    turns = iter(range(100))

    def fails(x: Any) -> Any:
        if next(turns) == number:
            raise ValueError("the sensor is gone")
        return x

    return ps.device_node(device="cpu", donate=True, pure=False, name="step")(
        lambda total, x: total + on_the_host(fails, x)
    )


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("number", [0, 2])
async def test_a_step_that_fails_ends_the_loop_and_says_that_the_state_is_lost(kind: str, number: int) -> None:
    given = jnp.ones(4)
    with pytest.raises(Exception, match="the sensor is gone") as caught:
        await engine.run(LOOPS[kind](failing_at(number))(given))
    assert any(f"the state of {kind} is lost: step, with donate=True" in note for note in caught.value.__notes__)
    assert given.tolist() == [1] * 4


async def test_a_cancelled_loop_leaves_the_state_of_the_caller() -> None:
    gate = Gate()
    step = ps.device_node(device="cpu", donate=True, pure=False)(lambda total, x: gate.pass_through(total) + x)
    given, graph = jnp.ones(4), folded(step)
    for passes in (0, 2):
        running = asyncio.ensure_future(engine.run(graph(given)))
        for _ in range(passes):
            gate.let_one_pass()
        await gate.entered(passes + 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        gate.let_one_pass()
    gate.open()
    assert (await engine.run(graph(given))).tolist() == [15.0] * 4
    assert given.tolist() == [1] * 4


async def test_a_step_of_rows_and_one_on_a_mesh() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    spread = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("data")))
    results = []
    for donate in (False, True):
        rows = step_of(donate).vmap(in_axes=(0, None))
        step = step_of(donate, device=mesh, in_specs=(jax.P("data"), None), out_specs=jax.P("data"))
        results.append([await engine.run(folded(one)(spread)) for one in (rows, step)])
    assert bits(results[0]) == bits(results[1])
    assert not is_gone(spread)


async def test_a_cut_of_a_fold_has_the_state_before_it_was_overwritten(tmp_path: Path) -> None:
    fails, source = [True], np.arange(64, dtype=np.float32)

    @ps.node
    def checked(record: data.Record[Any]) -> Any:
        if fails[0] and record.position == 40:
            raise ValueError("crashed")
        return record.value

    def total_by(step: Any) -> Any:
        return graph_of(lambda: ps.fold(step, data.order(source) >> data.read(source) >> checked, start), awaits=True)

    start = (jnp.zeros(3),) * 2
    graph = total_by(step_of())
    checkpoint = ps.Checkpoint(tmp_path, every_records=5)
    with pytest.raises(ValueError, match="crashed"):
        await engine.run(graph(), checkpoint=checkpoint)
    fails[0] = False
    got = await engine.run(graph(), checkpoint=checkpoint)
    assert bits(got) == bits(await engine.run(total_by(step_of(donate=False))()))


async def test_a_durable_loop_goes_on_from_what_it_has_kept(tmp_path: Path) -> None:
    durable = ps.Durable(tmp_path / "loops.db")
    with pytest.raises(Exception, match="the sensor is gone"):
        await engine.run(looped(failing_at(3), durable=durable)(jnp.ones(4)), durable_key="one")
    got = await engine.run(looped(failing_at(100), durable=durable)(jnp.ones(4)), durable_key="one")
    assert got.tolist() == [253.0] * 4


# Random bodies; the oracle is the same body with nodes that do not donate.


def random_body(seed: int, *, donate: bool) -> Any:
    step = step_of(donate, pure=False)

    async def body(total: Any, x: Any) -> Any:
        chosen, states, values = random.Random(seed), [total], [x]
        for _ in range(chosen.randint(1, 6)):
            state, value = chosen.choice(states), chosen.choice(values)
            match chosen.randrange(7):
                case 0 | 1:
                    states.append(step(state, value))
                case 2:
                    values.append(added_to(value, state["a"]))
                case 3:
                    values.append(plain(size(state)))
                case 4:
                    states.append({"a": state["b"], "b": chosen.choice(states)["a"]})
                case 5:
                    states.append(await ps.cond(is_small(state), lambda one: step(one, value), lambda one: one, state))  # noqa: B023
                case 6 if chosen.random() < 0.5:
                    turn = lambda one: step(one, added_to(value, state["a"]))  # noqa: B023, E731
                    states.append(await ps.while_loop(is_small, turn, state))
                case _:
                    states.append(await ps.fold(step, numbers(2), state))
        return chosen.choice(states[1:] or [step(total, x)])

    return body


# Buffers that a node makes from others, and that no other step reads.
@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("kind", LOOPS)
async def test_random_loops_give_the_same_bits(kind: str, effort: int) -> None:
    overwriting = 0
    for seed in range(6 * effort):
        given = {"a": jnp.ones(3), "b": jnp.arange(3.0)}
        results = []
        for donate in (False, True):
            body, turns = random_body(seed, donate=donate), iter(range(5))
            some_turns = ps.node(lambda total, turns=turns: next(turns) < 4)
            graph = folded(body) if kind == "fold" else looped(body, some_turns)
            results.append(bits(await engine.run(graph(given))))
            overwriting += "writes the next state over" in noted(graph)
        assert results[0] == results[1], seed
        assert bits(given) == bits({"a": np.ones(3, np.float32), "b": np.arange(3, dtype=np.float32)})
    assert overwriting > effort
