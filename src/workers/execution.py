"""The execution of nodes in worker processes: `runs_on="process"`, which is imported at its first use."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

from .. import Node
from ..actors.tasks import start_task, until
from ..extension import Attempt, Bound, CallsAhead, Execution, Places, Scope, Site
from .messages import NotSentError, WorkerInstance, process_target

if TYPE_CHECKING:
    from .pool import ProcessPool


class InProcesses(Execution):
    """Calls plain functions, and instances of classes, in worker processes."""

    has_one_instance = False
    needs_plain_def = True
    pool = "processes"

    def check(self, node: Node[..., Any]) -> None:
        """Refuse a function that is not a plain `def`, and options that need one instance for all items."""
        super().check(node)
        policy, template = node.policy, node.template
        if template is None:
            return
        given = {
            "restart=": policy.restart != "permanent",
            "restart_on=": bool(policy.restart_on),
            "ordered=True": policy.ordered,
        }
        for option, is_given in given.items():
            if is_given:
                raise TypeError(
                    f'stateful node {node.name!r} with runs_on="process" has an instance in each worker process, for '
                    f"objects that are slow to make, such as a model, and not for state: leave out {option}"
                )
        if hasattr(template, "__aenter__"):
            cls = template if isinstance(template, type) else type(template)
            raise TypeError(
                f'@node(runs_on="process") on class {cls.__name__!r}: a worker process has no event loop; write a '
                "plain `def __call__`, and `__enter__` and `__exit__` in place of `__aenter__` and `__aexit__`"
            )

    def places(self, node: Node[..., Any], scope: Scope) -> Places:
        """Return a place for each worker process, and room for items that are sent ahead."""
        return Places(scope.max_processes, CallsAhead.MOST * scope.max_processes)

    def bind(self, site: Site) -> Bound:
        """Return the `Bound` that lets a worker process make the call."""
        return InProcess(site)

    def make_instance(
        self, scope: Scope, cls: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return a stand-in: each worker process makes its own instance at the first call in the process."""
        return _InWorkers(args, kwargs)

    def bind_batch(
        self, fn: Callable[[list[Any]], Any], name: str, scope: Scope
    ) -> Callable[[list[Any]], Awaitable[Sequence[Any]]]:
        """Return a function that lets a worker process call `fn`."""
        function, bound_to, pool_of = getattr(fn, "__func__", fn), getattr(fn, "__self__", None), _pool_of(scope)

        async def in_process(items: list[Any]) -> Any:
            target, receiver = process_target(function), () if bound_to is None else (bound_to,)
            facts = {"node": name, "batch_size": len(items)}
            kills = scope.giving is not None and await scope.giving(name)
            try:
                return await pool_of().run(target, (*receiver, items), {}, facts, kills_worker=kills)
            except NotSentError as error:  # nothing has run: so the other items of the batch need not fail
                if len(items) == 1:
                    return [error]
            middle = len(items) // 2
            found: list[Any] = []
            for half in (items[:middle], items[middle:]):
                results = await in_process(half)
                if not isinstance(results, list | tuple) or len(cast("list[Any]", results)) != len(half):
                    raise ValueError(f"node {name!r} got {len(half)} items and did not return a list of {len(half)}")
                found += results
            return found

        return in_process

    def script_uses_engine(self) -> None:
        """End this process at once if it is a worker."""
        from .process import end_in_script

        end_in_script()


IN_PROCESSES: Final = InProcesses("process")
# Numbers of instances in worker processes. Worker processes serve all Engines of this process one after the other.
_in_workers = itertools.count(1)


class _InWorkers:
    """A stand-in for the instances of a class that worker processes make for one scope.

    Attributes:
        instance: the number of the instances, and the arguments of the class.
        pool: the pool whose workers may have made instances; None before the first call.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.instance = WorkerInstance(next(_in_workers), args, kwargs)
        self.pool: ProcessPool | None = None

    async def __aenter__(self) -> None:
        """Do nothing: the first call in a worker process makes the instance."""

    async def __aexit__(self, *error: object) -> None:
        """Leave the instances that were made."""
        if self.pool is not None:
            await self.pool.close_instances([self.instance.key])


class InProcess(Bound):
    """Calls a plain `def`, or an instance of a class, in a worker process.

    Args:
        site: the call site.
    """

    _pool: "ProcessPool | None"

    def __init__(self, site: Site) -> None:
        super().__init__()
        node, self._scope, self._name = site.node, site.scope, site.name
        self._pool_of, self._pool = _pool_of(site.scope), None
        self._target = process_target(node.fn if node.template is None else type(node.template))
        self._of_class = None if node.template is None else node
        # With a hedge, a second attempt may begin beside an attempt that is slow to begin or to end.
        self._is_hedged = node.policy.hedge is not None
        self.begins_later = not self._is_hedged  # when a process begins the call
        self._tells_begin = self.begins_later and node.policy.timeout_seconds is not None

    async def run(self, attempt: Attempt) -> Any:
        """Have a worker process make the call."""
        given, before, giving = perf_counter(), attempt.waited_seconds, self._scope.giving
        kills = giving is not None and await giving(self._name)
        pool, instance = self._pool, None
        if pool is None or pool.closed:  # a default Engine closes it with its last scope
            pool = self._pool = self._pool_of()
        if self._of_class is not None:
            stand_in: _InWorkers = self._scope.instance(self._of_class)
            stand_in.pool, instance = pool, stand_in.instance

        def begun() -> None:
            attempt.begun(before + perf_counter() - given)

        def took(seconds: float) -> None:
            attempt.waited_seconds = before + max(0.0, perf_counter() - given - seconds)

        work = pool.run(
            self._target, attempt.args, attempt.kwargs, attempt.log_fields, instance,
            priority=attempt.priority, begun=begun if self._tells_begin else None, took=took, kills_worker=kills,
        )  # fmt: skip
        if not self._is_hedged:
            return await work
        call = start_task(asyncio.get_running_loop(), work)
        attempt.keeps_place_until(call)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not attempt.is_lost and not call.done():  # the job of a lost race goes on: a cancel ends its process
                call.cancel()
                await until(call.done, lambda: asyncio.wait([call]))
            raise


def _pool_of(scope: Scope) -> "Callable[[], ProcessPool]":
    """Return a function that returns the pool of the Engine. The first call loads the code of the pool."""

    def opened() -> "ProcessPool":
        from .pool import ProcessPool

        return ProcessPool(scope.max_processes, scope.worker_started)

    return partial(scope.pool, "processes", opened, ends_with_scopes=True)
