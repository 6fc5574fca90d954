"""The tests of the hardest promises fail when the code behind a promise is broken.

Each mutant is one edit of a copy of the package, with a test that fails because of it. A change that moves the code
must change the mutant, too: an edit that no longer applies fails the run.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.forked import Forks, forking

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


# Modules that most of the tests below need, besides the package.
IMPORTED_ONCE = ("hypothesis", "jax", "opentelemetry.sdk.trace", "pytest_asyncio.plugin", "structlog", "uvloop")


class Mutant(NamedTuple):
    """One edit of a file, and the test that must fail because of it."""

    file: str
    text: str
    instead: str
    killed_by: str


# Runs a test with the package in the folder that PYTHONPATH names.
RUN_TEST = """
import os, sys
import pytest
sys.path.insert(0, os.environ["PYTHONPATH"])
status = pytest.main(sys.argv[1:])
sys.stdout.flush()
os._exit(status)
"""
OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "--timeout", "60",
    "-o", "faulthandler_timeout=120",  # ends the process if an event loop swallows the first timeout
    "-W", "ignore::pytest.PytestAssertRewriteWarning",  # of plugins that are imported already
)  # fmt: skip


MUTANTS = [Mutant(*row) for row in [
    ("insight/sums.py", "without_core <= _MOST_WITHOUT_CORE", "True",
     "tests/telemetry/test_profile.py::test_otherwise_no_verdict_is_about_the_gil"),
    ("insight/sums.py", "else max(left, taken)", "else left",
     "tests/telemetry/test_monitor.py::test_items_count_from_when_they_entered_also_beside_short_ones"),
    ("studio/live/watch.py", "if asked.show_messages else", "if True else",
     "tests/studio/test_look.py::test_failures_are_kept_also_while_nobody_looks"),
    ("engine/checkpoint.py", "name, copy=True, splits=splits, ", "name, splits=splits, ",
     "tests/saving/test_checkpoints.py::test_a_state_that_changes_in_place_is_copied"),
    ("saving/snapshots.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
     "tests/saving/test_snapshots.py::test_a_second_writer_is_refused_until_the_first_has_gone"),
    ("actors/channel.py", "return plain.popleft()", "return plain.pop()",
     "tests/actors/test_channel.py::test_it_is_first_in_first_out_and_holds_no_more_than_its_capacity"),
    ("engine/pipeline.py", "        frame.group.close()\n", "        frame.group.ended()\n",
     "tests/promises/test_promise_3_order.py::test_promise_3_the_calls_of_a_key_come_one_after_the_other"),
    ("actors/frame.py", '        if self.state == "running":\n            self.expired = expired\n',
     "        if True:\n            self.expired = expired\n",
     "tests/promises/test_random_worlds.py::test_promises_1_2_4_and_5_hold_in_random_worlds"),
    ("actors/attempts.py", "number >= retry.attempts", "number > retry.attempts",
     "tests/promises/test_promise_4_exactly_once.py::test_promise_4_what_was_asked_for_is_called_as_often_as_asked"),
    ("engine/source.py", "self._completion_order: deque[int] | None = None if ordered else deque()",
     "self._completion_order: deque[int] | None = deque()",
     "tests/promises/test_promise_3_order.py::test_promise_3_outputs_come_in_input_order"),
    ("engine/planning.py", "if is_node(step.callee) and step.callee.policy.pure:", "if is_node(step.callee):",
     "tests/engine/test_plan.py::test_what_is_not_pure_is_not_merged"),
    ("engine/bodies.py", "and len(self.frames) < self._limit", "and len(self.frames) <= self._limit",
     "tests/engine/test_control_flow.py::test_map_each_runs_as_many_bodies_at_a_time_as_it_may"),
    ("actors/supervision.py", "if len(self._restarts) > self.flags.max_restarts:",
     "if len(self._restarts) >= self.flags.max_restarts:",
     "tests/actors/test_supervision.py::test_any_exits_are_answered_as_in_a_model_of_otp"),
    # the items that fail a batch are found, and no others blamed
    ("devices/failed_batches.py", "and len(calls) > 1:", "and len(calls) > 2:",
     "tests/devices/test_batches.py::test_items_that_fail_are_found_in_few_runs_and_no_others_are_blamed"),
    ("engine/tracing/references.py", "    def changed(self) -> bool:\n        \"\"\"Whether a name now",
     "    def changed(self) -> bool:\n        return False\n        \"\"\"Whether a name now",
     "tests/engine/test_staleness.py::test_a_notebook_cell_that_is_run_again"),
    ("saving/durable.py", "return self._loop.step, await self._in_thread(decoded, self._loop.state, initial)",
     "return 0, initial",
     "tests/saving/test_durable.py::test_a_call_that_has_failed_goes_on_and_one_with_a_result_begins_anew"),
    ("telemetry/spans.py", "otel_context.attach(trace.set_span_in_context(self._span))",
     "otel_context.attach(parent.context)",
     "tests/telemetry/test_spans.py::test_a_call_is_a_child_of_its_callers_span_and_has_one_span_per_node"),
    ("consume/partitions.py", "                if error is not None:\n", "                if False:\n",
     "tests/consume/test_kafka.py::test_dead_letters_have_their_source_and_a_refused_one_is_written_again"),
    ("serving/application.py", " if hmac.compare_digest(digest, given)]", "]",
     "tests/serving/test_openai.py::test_keys_open_the_door_and_share_places_by_name"),
    ("studio/live/server.py", "_MODE: Final = 0o600", "_MODE: Final = 0o666",
     "tests/studio/test_expose.py::test_only_the_owner_may_connect_whatever_the_umask"),
    # durable runs: calls of handlers have numbers for names
    ("durable/journal.py", 'found = f"{name}({digest_of(arguments)})"', 'found = f"{name}()"',
     "tests/durable/test_lives.py::test_what_was_kept_never_runs_again_and_an_effect_has_one_key"),
    # a kept result is handed on when the handler asks for it
    ("durable/journal.py", "        if self._given is not None and self.kept[path].moment == self._given[1]:\n",
     "        if True:\n",
     "tests/durable/test_lives.py::test_what_was_kept_never_runs_again_and_an_effect_has_one_key"),
    # an effect begins before the commit
    ("durable/journal.py", "path)\n        await self._writer.barrier(self.run)\n", "path)\n",
     "tests/durable/test_lives.py::test_what_was_kept_never_runs_again_and_an_effect_has_one_key"),
    # a value is encoded after its first reader has begun
    ("durable/journal.py", 'self.append(f"{path}{{{site.wiring}}}", "result",',
     'self._loop.call_soon(self.append, f"{path}{{{site.wiring}}}", "result",',
     "tests/durable/test_lives.py::test_what_was_kept_never_runs_again_and_an_effect_has_one_key"),
    ("durable/sql.py", "found is None or found.epoch != batch.epoch", "found is None",
     "tests/durable/test_lives.py::test_a_process_that_believes_in_its_lease_writes_nothing_when_it_is_lost"),
]]  # fmt: skip

# For `make test-long`: mutants of parts that have a mutant above, or mutants that hang until the timeout of their test.
MORE_MUTANTS = [Mutant(*row) for row in [
    ("insight/monitor.py", "if limit in before or", "if True or",
     "tests/telemetry/test_monitor.py::test_a_new_verdict_counts_once_two_snapshots_agree"),
    ("insight/watching.py", "calls = [] if frame is None else", "calls = [] if True else",
     "tests/studio/test_look.py::test_a_loop_that_does_not_answer_is_said_so_with_the_stack_of_its_thread"),
    ("data/records.py", "self._places = range(number, end, count)", "self._places = range(0, end, count)",
     "tests/data/test_order.py::test_shards_are_disjoint_cover_all_and_differ_by_one"),
    ("telemetry/metrics.py", "            if once in shared:\n", "            if False:\n",
     "tests/telemetry/test_metrics.py::test_a_limit_that_scopes_share_counts_once"),
    ("actors/threads.py", "        await self._free.acquire()\n", "        pass\n",
     "tests/runtime/test_limits.py::test_max_workers_bounds_the_threads_that_each_has_busy_over_all_call_sites"),
    ("actors/worker.py", "            or self.budget < LONGEST_LINE\n", "",
     "tests/promises/test_promise_7_nothing_blocks_the_loop.py::test_promise_7_the_loop_gets_its_turn_after_256_hops_at_most"),
    # values that the reader of a failed stream has not taken are dropped
    ("actors/stream_buffer.py", "        self.error = error\n        self.held.clear()\n",
     "        self.error = error\n",
     "tests/engine/test_ends_of_streams_as_values.py"),
    # a token is taken once
    ("engine/rate_limit.py", "self.full_at = max(now, self.full_at)", "self.full_at = self.full_at * 1",
     "tests/runtime/test_rate_limit.py"),
    ("actors/batching.py", "self.count >= self._max_size +", "self.count > self._max_size +",
     "tests/runtime/test_batching.py::test_what_waits_beyond_max_queue_is_refused"),
    ("engine/events.py", "event, work, turn = line.popleft()", "event, work, turn = line.pop()",
     "tests/engine/test_events.py::test_emitters_that_wait_for_room_are_let_in_in_the_order_in_which_they_came"),
    # a barrier waits until the values before it have left a map_each
    ("engine/stream_map.py", "is_next and not (window.frames and (place.stop.called or self.drains))", "is_next",
     "tests/saving/test_interrupted_pipelines.py"),
    # a channel holds no more than its capacity
    ("actors/channel.py", "if priority or count >= self._capacity or", "if priority or count > self._capacity or",
     "tests/actors/test_channel.py"),
    ("actors/chains.py", "if free <= 0 or not values{", "if free <= 0{",
     "tests/actors/test_written_out.py::test_an_item_that_ends_in_a_line_goes_no_further"),
    # a line takes no item in a task that was cancelled
    ("actors/worker.py", "            or task.cancelling() != self.undisturbed\n", "",
     "tests/runtime/test_handlers_keep_their_task.py"),
    # branches that wait do not wait for each other
    ("actors/worker.py", "            if taken > 0:", "            if True:",
     "tests/runtime/test_handlers_keep_their_task.py"),
    ("engine/stream_map.py", "self._barriers[0][0] <= window.position", "True",
     "tests/saving/test_checkpoints.py::test_a_barrier_waits_for_what_runs_before_it"),
    ("engine/checkpoint_schedule.py", "share = 0 if position < self._unread_end else ", "share = ",
     "tests/saving/test_intervals.py::test_each_life_goes_on_from_the_last_multiple"),
    # what is behind a barrier waits until it was passed
    ("actors/stream_buffer.py", "self._behind[-1][1].append(value)", "self.held.append(value)",
     "tests/saving/test_interrupted_pipelines.py"),
    ("engine/checkpoint_path.py", "        if not has_state(kind if is_instance else holder):\n", "        if False:\n",
     "tests/saving/test_stateful_callables.py::test_what_cannot_tell_its_state_is_refused"),
    ("saving/snapshots.py", "if verify and text != json_text(_checksums(path)):", "if False:",
     "tests/saving/test_snapshots.py::test_every_flipped_bit_is_seen"),
    ("saving/snapshots.py", "    _sync(path)\n    return sum(", "    return sum(",
     "tests/saving/test_snapshots.py::test_everything_is_synchronised_before_it_gets_its_name"),
    ("saving/encoding.py", "if path[0] > _MOST_LEVELS:", "if False:",
     "tests/saving/test_encoding.py::test_what_is_refused_is_named_with_its_path_and_type"),
    # a stream of which something was read is not begun again
    ("actors/attempts.py", "and any(reader.buffer.position for reader in attempt._readers):", "and False:",
     "tests/engine/test_ends_of_streams_as_values.py"),
    ("engine/admission.py", "len(self._aside) < self._max_queue", "len(self._aside) <= self._max_queue",
     "tests/engine/test_options.py::test_max_queue_and_priority_decide_who_waits_for_a_place"),
    ("engine/admission.py", "share.start += max(0.0, self._level - share.level(now))", "pass",
     "tests/engine/test_admission.py::test_a_key_that_was_away_has_saved_nothing_up"),
    ("engine/admission.py", "while furthest and furthest[0] < own:", "while furthest and furthest[0] > own:",
     "tests/engine/test_admission.py::test_when_the_queue_is_full_the_newest_call_of_the_greediest_key_makes_room"),
    ("engine/rate_limit.py", "            if full_at > now:\n", "            if False:\n",
     "tests/runtime/test_rate_limit.py::test_forgetting_lifts_no_limit"),
    ("devices/whole_arrays.py", "array if real == array.shape[axis] else array[(*before, slice(real))]", "array",
     "tests/devices/test_whole_arrays.py::test_it_is_equal_to_vmap"),
    # a stream holds no more values than its capacity
    ("actors/stream_buffer.py", "if len(held) >= self.capacity or", "if len(held) > self.capacity or",
     "tests/promises/test_promises_of_streams.py"),
    # control flow runs unless all steps in its bodies may be left out
    ("engine/planning.py", "_is_durable(step) or any(not _why", "_is_durable(step) or all(not _why",
     "tests/engine/test_plan.py"),
    # an effect begins when the steps before it have ended
    ("engine/tracing/tracer.py", "waits = ends - read", "waits = set[int]()",
     "tests/engine/test_effects.py"),
    # steps behind an effect begin when it has ended
    ("engine/tracing/tracer.py", "waits = set[int]() if effect is None or read & since else {effect}",
     "waits = set[int]()",
     "tests/engine/test_effects.py"),
    # a retry without a pause gives the loop its turn
    ("actors/attempts.py", "                await asyncio.sleep(pause)\n",
     "                if pause:\n                    await asyncio.sleep(pause)\n",
     "tests/promises/test_promise_7_nothing_blocks_the_loop.py"),
    # what was called runs, unless it is pure
    ("engine/planning.py", 'return "it is pure" if callee.policy.pure else ""\n', 'return "it is pure"\n',
     "tests/engine/test_unread.py"),
    # a node that waits for itself is refused
    ("actors/node_actor.py", "for one in held}) < limiter.limit", "for one in held}) <= limiter.limit",
     "tests/runtime/test_reentrancy.py"),
    # the rows of padding repeat one that is real
    ("devices/arguments.py", "np.array(rows)\n    column[len(rows) :] = column[len(rows) - 1]",
     "np.array(rows)\n    column[len(rows) :] = 0",
     "tests/devices/test_stacking.py"),
    # work that has to be finished is finished, although its task is cancelled
    ("actors/tasks.py", "    with anyio.CancelScope(shield=True):\n        while not is_over():\n",
     "    with anyio.CancelScope(shield=True):\n        while False:\n",
     "tests/runtime/test_cancelled_while_unwinding.py"),
    ("saving/durable.py", "            if not loop.is_free(now):\n", "            if False:\n",
     "tests/saving/test_runs.py::test_a_key_that_a_call_has_is_neither_deleted_nor_expired"),
    ("saving/durable.py", 'found.status == "done" and self.on_finished != "again"', "found is None",
     "tests/saving/test_runs.py::test_a_call_that_is_made_twice_runs_once_and_has_its_result_twice"),
    ("saving/durable.py", "if found is not None and not found.is_free(now):", "if False:",
     "tests/saving/test_durable.py::test_a_key_is_run_by_one_call_at_a_time"),
    ("saving/store.py", "        if is_expected:\n", "        if True:\n",
     "tests/saving/test_durable.py::test_a_sqlite_store_expects_versions"),
    ("saving/durable.py", "del self._unused[index]", "pass",
     "tests/saving/test_interrupt.py::test_answers_are_found_by_question_and_order"),
    ("actors/attempts.py", "if position.calls is not None and not bound._goes_on:", "if False:",
     "tests/runtime/test_late_steps.py::test_what_is_left_is_cancelled_and_waited_for_when_the_handler_ends"),
    ("actors/current.py", "frame.item, frame.group.step]", "frame.item]",
     ("tests/runtime/test_late_steps.py::"
      "test_a_key_is_the_same_in_each_attempt_and_after_a_restart_and_of_no_other_work")),
    ("engine/events.py", 'or frame.state != "running" or', "or",
     "tests/engine/test_events.py::test_an_item_that_was_cancelled_emits_nothing_more"),
    ("engine/one_call_stream.py", "or held[0]._after <= values.position):", "or held[0]._after >= 0):",
     "tests/engine/test_events.py::test_one_iterator_gives_events_and_values_in_the_order_of_the_node"),
    ("asgi.py", "begin(self.stall_timeout_seconds)", "begin(None)",
     "tests/serving/test_asgi.py::test_a_client_that_stalls_ends_its_call_and_one_that_is_only_slow_does_not"),
    ("asgi.py", "if self._is_lost():", "if False:",
     "tests/serving/test_asgi.py::test_a_lost_connection_that_only_its_transport_knows_ends_the_call"),
    ("devices/enqueue_order.py", "keys = sorted({(device.platform, device.id) for device in devices})",
     "keys = [(device.platform, device.id) for device in devices]",
     "tests/devices/test_enqueue_order.py::test_locks_are_taken_in_one_order_and_a_single_device_needs_none"),
    # an argument that a batch shares is not padded
    ("devices/parameter_checks.py", "for one in shared & {*others}:", "for one in ():",
     "tests/devices/test_shared_arguments.py"),
    ("consume/partitions.py", "                await asyncio.sleep(pause)\n                pause = min(",
     "                return\n                pause = min(",
     "tests/consume/test_kafka.py::test_dead_letters_have_their_source_and_a_refused_one_is_written_again"),
    ("consume/consumer.py", "if self._held._has_ended or any(one._source is self._source for one in _open):",
     "if False:",
     "tests/consume/test_consumer.py::test_a_consumer_is_entered_once_and_has_its_source_for_itself"),
    ("data/records.py", 'Permutation(self._length, f"{self._seed} {self.epoch}")',
     'Permutation(self._length, f"{self._seed}")',
     "tests/data/test_order.py::test_each_epoch_has_another_order_and_all_records"),
    ("data/stages.py", "            if not held or self._drop_remainder:", "            if not held:",
     "tests/data/test_stages.py::test_batched"),
    ("data/stages.py", "self.held.appendleft(part_of(batch, slice(size, None)))", "pass",
     "tests/data/test_stages.py::test_rebatched"),
    ("data/stages.py", "packed.segment_ids[start:end] = number", "packed.segment_ids[start:end] = 1",
     "tests/data/test_stages.py::test_packed"),
    ("data/batches.py", "if array.dtype != dtype:", "if False:",
     "tests/data/test_stages.py::test_what_is_not_alike_is_named_by_value_and_leaf"),
    ("data/records.py", "if self._is_taken and _is_iterator(self.value):", "if False:",
     "tests/data/test_order.py::test_an_iterator_that_is_written_in_a_graph_is_not_read_twice"),
    ("consume/partitions.py", "        if not self._source.is_log:\n            self.unsettled.append(",
     "        if True:\n            self.unsettled.append(",
     "tests/consume/test_consumer.py::test_whatever_goes_wrong_nothing_is_lost_and_only_a_prefix_is_settled"),
    ("consume/partitions.py", "if isinstance(error, NotFinished):", "if False:",
     "tests/consume/test_kafka.py::test_what_a_drain_leaves_comes_again_and_is_no_dead_letter"),
    ("consume/partitions.py", "            await self._give_up([partition])\n", "            pass\n",
     "tests/consume/test_consumer.py::test_a_commit_that_is_too_late_cancels_what_is_open_and_commits_nothing_more"),
    ("consume/kafka.py", "if coordinator.generation != generation or self._offsets is not offsets:", "if False:",
     "tests/consume/test_kafka.py::test_a_member_that_its_group_has_given_up_does_not_set_offsets_back"),
    ("consume/partitions.py", "        if self.before:\n", "        if False:\n",
     "tests/consume/test_consumer.py::test_a_partition_that_comes_back_waits_for_handlers_that_still_unwind"),
    ("consume/partitions.py", "own = self._max_open // (len(self._held) or 1)", "own = 0",
     "tests/consume/test_consumer.py::test_a_slow_message_delays_its_key_and_no_other_partition"),
    ("actors/own_loops.py", "if not isinstance(error, Exception) or (", "if error is None or (",
     "tests/runtime/test_own_loops.py::test_the_error_of_a_block_is_that_of_its_work_alone"),
    ("actors/own_loops.py", "        self.buffer.wake_producer()  # which", "        pass  # which",
     "tests/runtime/test_own_loop_streams.py::test_a_loop_waits_for_room_as_long_as_it_says"),
    ("telemetry/spans.py", "    if not own_span:", "    if not waits:",
     "tests/telemetry/test_spans.py::test_steps_are_counted_and_have_no_spans_by_default"),
    ("devices/device_pool.py", "self._owner = device, owner", "self._owner = device, DevicePool",
     "tests/devices/test_device_actors.py::test_actors_on_one_device_take_turns"),
    ("devices/recompilation.py", "in self._announced:", "in ():",
     ("tests/devices/test_device_actors.py::"
      "test_shapes_that_were_announced_are_compiled_before_and_are_no_recompilations")),
    ("serving/application.py", "if len(raw) > self._max_body_bytes:", "if False:",
     "tests/serving/test_openai.py::test_a_body_that_is_too_large_is_not_read"),
    ("serving/application.py", "if self._traces_content and made", "if made",
     "tests/serving/test_measures.py::test_a_chat_through_two_services_is_one_tree"),
    ("serving/replicas.py", "return self.failed >= self.failures and", "return False and",
     "tests/serving/test_upstreams.py::test_a_breaker_refuses_and_tries_again"),
    ("serving/upstreams.py", "min(well, key=lambda one: one.in_flight), 0.0", "well[0], 0.0",
     "tests/serving/test_upstreams.py::test_a_conversation_stays_at_its_server_unless_that_has_far_more_to_do"),
    ("serving/replicas.py", "one.breaker.is_open, one.is_down, one in asked,", "one.breaker.is_open, one in asked,",
     "tests/serving/test_outages.py::test_a_server_that_is_down_gets_no_request_until_a_check_has_found_it_well"),
    ("serving/replicas.py", "isinstance(error, UpstreamError) and error.status not in _BUSY", "True",
     "tests/serving/test_outages.py::test_a_server_that_is_busy_is_not_down"),
    ("serving/replicas.py", "if at >= first:", "if True:",
     "tests/serving/test_routing.py::test_what_differs_before_the_first_question_is_another_conversation"),
    ("serving/replicas.py", "messages[: first + 1]", "messages[:first]",
     "tests/serving/test_routing.py::test_each_server_has_its_own_conversations"),
    ("serving/replicas.py", "if one.in_flight <= most]", "]",
     "tests/serving/test_upstreams.py::test_a_conversation_stays_at_its_server_unless_that_has_far_more_to_do"),
    ("serving/reading.py", 'if _DONE not in events.feed(b"\\n"):', "if False:",
     "tests/serving/test_upstreams.py::test_what_is_wrong_with_a_server_is_an_error_with_its_status"),
    ("serving/upstreams.py", "            if not is_done:\n                aborted",
     "            if False:\n                aborted",
     "tests/serving/test_upstreams.py::test_an_engine_in_the_process_is_a_node_and_a_reader_who_leaves_aborts"),
    ("studio/layered.py", "if crossings < fewest:", "if crossings > fewest:",
     "tests/studio/test_drawing.py::test_boxes_are_ordered_so_that_edges_do_not_cross_in_svg"),
    ("studio/perfetto.py", "while busy and busy[0][0] <= began:", "while busy:",
     "tests/studio/test_perfetto.py::test_whatever_overlaps_is_put_side_by_side"),
    ("studio/live/server.py", "if len(self._clients) >= MAX_CLIENTS:", "if False:",
     "tests/studio/test_expose.py::test_more_clients_than_there_is_room_for_are_told"),
    ("studio/live/server.py", "if listener := _who_listens(path):", 'if listener := "":',
     "tests/studio/test_expose.py::test_a_socket_that_somebody_listens_at_is_left_alone"),
    ("studio/page/web.py", "or not compare_digest(token.encode(), self.server.token.encode())", "",
     "tests/studio/test_studio.py::test_without_the_token_nothing_is_told"),
    ("studio/page/web.py", "not in self.server.hosts:", "in ():",
     "tests/studio/test_studio.py::test_another_name_of_the_machine_is_refused"),
    ("studio/page/page.py", "name = escape(printable(profile.node))", "name = printable(profile.node)",
     "tests/studio/test_page.py::test_what_names_say_is_text"),
    ("telemetry/counters.py", "sum(one.in_flight for one in places.values())", "sum(one.in_flight for one in every)",
     "tests/studio/test_running_drawing.py::test_loads_of_folded_siblings_add_up_and_places_that_they_share_count_once"),
    ("telemetry/text.py", "c if c.isprintable() else", "c if True else",
     "tests/engine/test_plan.py::test_a_name_that_would_drive_the_terminal_is_shown_escaped"),
    ("telemetry/metrics.py", "self._departed.append((source, counters))  # before",
     "self._departed.append((source, {}))  # before",
     "tests/telemetry/test_metrics.py::test_a_stream_counts_its_items_while_it_is_open_and_afterwards"),
    ("telemetry/metrics.py", "max(value, self._highest.get(series, value))", "value",
     "tests/telemetry/test_metrics_registry.py::test_a_counter_that_lost_a_source_without_its_end_does_not_go_back"),
    ("telemetry/logs.py", "if _ITEM_FIELDS.isdisjoint(event_dict):", "if True:",
     "tests/telemetry/test_logs.py::test_what_an_event_says_itself_stays"),
    ("telemetry/spans.py", "(_text(name).lower(), _text(value))", "(_text(name), _text(value))",
     "tests/telemetry/test_continue_trace.py::test_headers_of_any_form_and_case"),
    ("telemetry/logs.py", "    except BaseException as error:", "    except KeyboardInterrupt as error:",
     "tests/telemetry/test_doors.py::test_the_first_error_of_a_door_is_logged_and_no_other"),
    ("actors/calls_ahead.py", "if self.count > 1 else None", "if self.count > 2 else None",
     "tests/workers/test_calls_ahead.py::test_any_calls_are_given_taken_back_and_counted_as_in_a_model"),
    ("actors/execution.py", "return self._member.cut is LOST", "return False",
     "tests/workers/test_both.py::test_a_process_that_loses_is_not_killed"),
    ("engine/pools.py", "if ends_with_scopes and self._ends_with_loop:", "if False:",
     "tests/workers/test_both.py::test_the_processes_of_the_default_engine_end_with_its_last_scope"),
    ("workers/process.py", "if not self.calls or self.calls[0].number != number:", "if not self.calls:",
     "tests/bad_days/test_threads_and_processes.py::test_a_worker_whose_answers_belong_to_no_call_is_killed"),
    ("workers/worker.py", "            if os.getpid() != _worker:\n                end_forked(None)\n", "",
     "tests/workers/test_both.py::test_a_process_that_a_handler_has_forked_answers_nothing"),
    ("telemetry/logs.py", "except BaseException as broken:", "except KeyboardInterrupt as broken:",
     "tests/telemetry/test_spans.py::test_an_error_without_a_text_is_the_one_that_is_raised"),
]]  # fmt: skip


def test_every_edit_applies_and_compiles() -> None:
    for mutant in MUTANTS + MORE_MUTANTS:
        text = (SOURCE / mutant.file).read_text()
        assert text.count(mutant.text) == 1, mutant
        compile(text.replace(mutant.text, mutant.instead), mutant.file, "exec")
        path, _, test = mutant.killed_by.partition("::")
        assert f"def {test}" in (ROOT / path).read_text(), mutant.killed_by


def test_each_floor_has_six_mutants() -> None:
    found = Counter(mutant.file.partition("/")[0] for mutant in MUTANTS + MORE_MUTANTS)
    for floor in ("actors", "engine", "devices", "saving", "data", "telemetry", "studio", "serving", "consume"):
        assert found[floor] >= 6, floor


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with forking(*IMPORTED_ONCE) as found:
        yield found


@pytest.mark.parametrize(
    "mutant",
    [*MUTANTS, *(pytest.param(mutant, marks=pytest.mark.long) for mutant in MORE_MUTANTS)],
    ids=lambda mutant: mutant.killed_by.rpartition("::")[2],
)
@pytest.mark.timeout(180)  # long enough for a mutant that hangs on a busy machine
def test_a_broken_promise_is_noticed(mutant: Mutant, forks: Forks, tmp_path: Path) -> None:
    copy = tmp_path / "penstock"
    # Copy the bytecode too, since compiling takes longer than most tests; leave out files that another test is writing.
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("*.pyc.*"))
    path = copy / mutant.file
    path.write_text(path.read_text().replace(mutant.text, mutant.instead))
    status, said, errors = forks.run(RUN_TEST, *OPTIONS, mutant.killed_by, PYTHONPATH=str(tmp_path))
    assert status == 1, f"{mutant.killed_by} does not notice\n{said}{errors}"
    assert "1 failed" in said or "1 error" in said, said
