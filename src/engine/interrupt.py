"""`interrupt`: a handler asks a person, the call ends, and goes on with the answer, perhaps in another process."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from .._errors import PlanError
from ..actors.current import calling_actor, enclosing_frame
from .bodies import runs_beside_others
from .call import RunningCall
from .decorator import node
from .late_steps import handler_of, path_of
from .tracing.tracer import active


def interrupt(question: object, /) -> Awaitable[Any]:
    """Ask a person: end the call with `Interrupted`, and return the answer when its key is run with `answer=`.

        approved = await ps.interrupt({"pay": 120})

    `interrupt` is for a node in the body of a durable loop (`ps.while_loop(..., durable=...)`), or for that body
    itself. With the answer, the iteration runs again from its beginning, so its steps before the question run again.
    Answers are kept until the iteration has ended, and are found by the question. A question that is asked several
    times gets the answers in their order. If several questions are asked at once, the first ends the call; the next is
    asked when the first is answered.

    Args:
        question: the question, made of values that a state may have; it must be equal in each run of the iteration.

    Returns:
        An awaitable of the answer.

    Raises:
        PlanError: the caller is not in an iteration of a durable loop; or it is inside of a `map_each`, of a call that
            a node makes, or of a node with `cache=`; or it is in a thread, a process or a plain `def`, which cannot
            wait.
        NotStorable: the question cannot be stored.
    """
    if active() is not None:
        return _step(question)
    actor = calling_actor()
    if asyncio._get_running_loop() is None or (actor is not None and actor.bound._links):  # links: a plain `def`
        raise PlanError(
            f"ps.interrupt({question!r}) was called in a thread, a process or a plain `def`, which cannot wait for the "
            "answer: ask in an `async def` of the loop's body, as in `answer = await ps.interrupt(...)`"
        )
    return _ask(question)


async def _ask(question: object, /) -> Any:
    from ..saving.durable import present

    actor = calling_actor()
    if actor is not None and actor.owner.keeps:
        handling = handler_of(f"ps.interrupt({question!r})")
        place = None if handling is None or handling.frame is None else handling.frame.place
        if place is not None and handling is not None:
            return await place.keeper.ask(path_of(place, handling), question)
    call, frame = present.get(), enclosing_frame()
    if call is None and frame is not None and any(around.waiters for around in frame.lineage()):
        raise PlanError(
            f"ps.interrupt({question!r}) was called in a node that keeps its results, which are for all equal calls, "
            "and an answer is for one: ask in a node without cache="
        )
    if call is None or call.frame is None or frame is None or frame is call.frame:
        raise PlanError(f"ps.interrupt({question!r}) {_ONLY}")
    for around in frame.lineage():
        if around is call.frame:
            break
        if runs_beside_others(around):
            is_call = isinstance(around, RunningCall)
            where = "of a call that a node makes, which" if is_call else "of a map_each, whose items"
            raise PlanError(
                f"ps.interrupt({question!r}) was called inside {where} could not tell their answers apart: ask in the "
                "body of the durable loop, before or after that"
            )
    try:
        return call.ask(question)
    except LookupError:
        raise PlanError(f"ps.interrupt({question!r}) {_ONLY}") from None


_ONLY = (
    "was called outside of the body of a durable loop: ps.while_loop(predicate, body, initial, durable=ps.Durable(...))"
)
_step = node(name="interrupt", effectful=True)(_ask)
