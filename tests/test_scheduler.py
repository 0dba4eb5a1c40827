"""The scheduler over the real hierarchy, real copies and an engine whose every answer proves its rows."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.arithmetic_engine import VOCAB, ArithmeticEngine, expected
from tests.serving import Int32
from trt_backend.config import ReclaimOrder, Residency
from trt_backend.kv.hierarchy import Hierarchy, PoolSizes
from trt_backend.kv.layout import IndexGroup, KvLayout, KvSource
from trt_backend.kv.residency import POLICIES, ResidencyTuning
from trt_backend.kv.tables import SlotTables
from trt_backend.kv.transfers import Fence
from trt_backend.memory.arena import RowStore
from trt_backend.memory.cpu import CpuTransfers
from trt_backend.request import ErrorCode, FinishReason, Output, Request, RequestError
from trt_backend.scheduler import Scheduler, SchedulerLimits

MAX_LEN = 400


@dataclass(eq=False)
class House:
    """A scheduler, what is below it, and everything it has delivered."""

    scheduler: Scheduler
    hierarchy: Hierarchy
    engine: ArithmeticEngine
    transfers: CpuTransfers
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    over: dict[str, threading.Event] = field(default_factory=dict)

    def submit(self, request: Request) -> None:
        self.outputs[request.id] = []
        self.over[request.id] = threading.Event()
        self.scheduler.submit(request, self._deliver)

    def _deliver(self, output: Output) -> None:
        self.outputs[output.request_id].append(output)
        if output.finish is not None:
            self.over[output.request_id].set()

    def wait(self, request_id: str) -> Output:
        assert self.over[request_id].wait(120), self.scheduler.snapshot()
        return self.outputs[request_id][-1]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.tokens]

    def wait_for(self, condition: str) -> None:
        """Wait until an attribute of the snapshot is at least 1."""
        deadline = time.monotonic() + 60
        while getattr(self.scheduler.snapshot(), condition) < 1:
            assert time.monotonic() < deadline, self.scheduler.snapshot()
            time.sleep(0.001)

    def assert_empty(self) -> None:
        """Everything is back."""
        self.hierarchy.poll()
        self.hierarchy.check()
        assert self.hierarchy.pages.budget.free == self.hierarchy.sizes.device_pages
        assert (self.hierarchy.host.used, self.hierarchy.index.used, self.hierarchy.slots.used) == (0, 0, 0)


def build(
    residency: Residency,
    device_pages: int,
    slots: int = 8,
    queue_limit: int = 100,
    chunk: int = 24,
    tuning: ResidencyTuning | None = None,
    transfer_timeout: float = 30.0,
    host_pages: int | None = None,
) -> House:
    hot_tokens = 0 if residency is Residency.RESIDENT else 16
    layout = KvLayout((KvSource("only", 8),), (IndexGroup((0,), 16, 4),), page_tokens=8, hot_tokens=hot_tokens)
    sizes = PoolSizes(
        slots, device_pages, host_pages=host_pages or slots * 50, index_pages=slots * 50, chunk_tokens=chunk
    )
    tables = SlotTables.empty(layout, slots, MAX_LEN)
    arenas, pool = RowStore(layout, sizes.device_pages), RowStore(layout, sizes.host_pages)
    transfers = CpuTransfers(arenas, pool)
    hierarchy = Hierarchy(layout, POLICIES[residency], tables, transfers, sizes, tuning)
    engine = ArithmeticEngine(layout, tables, arenas, pool)
    scheduler = Scheduler(hierarchy, engine, SchedulerLimits(queue_limit, chunk, MAX_LEN, transfer_timeout))
    return House(scheduler, hierarchy, engine, transfers)


@pytest.fixture
def house() -> Iterator[House]:
    """A small hisparse deployment, running."""
    house = build(Residency.HISPARSE, device_pages=60)
    house.scheduler.start()
    yield house
    house.engine.gate.set()
    house.scheduler.stop(drain_seconds=0)
    house.transfers.close()


def prompt(length: int, seed: int = 0) -> Int32:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


@pytest.mark.parametrize(
    ("residency", "pages", "tuning"),
    [
        (Residency.RESIDENT, 120, ResidencyTuning()),
        (Residency.HISPARSE, 60, ResidencyTuning()),
        *(
            (Residency.ADAPTIVE, pages, ResidencyTuning(order, 2, 2, 8, background, promote))
            for pages, order, background, promote in (
                (60, ReclaimOrder.OLDEST, 4, True),
                (60, ReclaimOrder.COLDEST, 0, False),
                (100, ReclaimOrder.NEWEST, 2, True),
                (100, ReclaimOrder.LARGEST, 0, True),
                (24, ReclaimOrder.OLDEST, 1, True),
            )
        ),
    ],
)
def test_every_request_gets_its_own_answer_when_many_share_a_small_pool(
    residency: Residency, pages: int, tuning: ResidencyTuning
) -> None:
    house = build(residency, pages, tuning=tuning)
    rng = np.random.default_rng(3)
    requests = [Request(f"r{i}", prompt(int(rng.integers(1, 200)), i), int(rng.integers(1, 150))) for i in range(60)]
    for request in requests:
        house.submit(request)
    house.scheduler.start()
    for request in requests:
        assert house.wait(request.id).finish is FinishReason.LENGTH
        assert house.tokens(request.id) == expected(request.prompt, request.max_tokens)
        assert sum(output.finish is not None for output in house.outputs[request.id]) == 1
    house.scheduler.stop(drain_seconds=5)
    house.transfers.close()
    house.assert_empty()
    if residency is Residency.ADAPTIVE:
        assert house.hierarchy.moved.reclaimed > 0, "nothing was ever short"


def test_prompts_go_on_in_chunks_while_others_decode(house: House) -> None:
    house.engine.gate.clear()
    house.submit(Request("decoding", prompt(5), 60))
    house.submit(Request("importing", prompt(240, 1), 3))
    house.engine.gate.set()
    house.wait("importing")
    house.wait("decoding")
    mixed = [prefill for decodes, prefill in house.engine.batches if decodes and prefill]
    assert sum(mixed) >= 200
    assert max(prefill for _, prefill in house.engine.batches) == 24


def test_an_end_token_ends_the_answer_and_is_its_last_token(house: House) -> None:
    answer = expected(prompt(30), 40)
    end = answer[7]
    house.submit(Request("r", prompt(30), 40, end_ids=frozenset({end})))
    assert house.wait("r").finish is FinishReason.STOP
    assert house.tokens("r") == answer[: answer.index(end) + 1]


def test_a_cancelled_request_stops_and_leaves_the_others_alone(house: House) -> None:
    house.submit(Request("other", prompt(90, 1), 200))
    house.submit(Request("doomed", prompt(90, 2), 300))
    house.wait_for("decoding")
    house.scheduler.cancel("doomed")
    last = house.wait("doomed")
    assert last.finish is FinishReason.CANCELLED
    assert str(last.error).startswith("CANCELLED id=doomed cancelled after ")
    house.wait("other")
    assert house.tokens("other") == expected(prompt(90, 1), 200)


def test_a_request_can_be_cancelled_while_it_waits(house: House) -> None:
    house.engine.gate.clear()
    for i in range(12):
        house.submit(Request(f"r{i}", prompt(100, i), 200))
    house.scheduler.cancel("r11")
    house.engine.gate.set()
    assert str(house.wait("r11").error) == "CANCELLED id=r11 cancelled while it waited"
    for i in range(11):
        house.wait(f"r{i}")
        assert house.tokens(f"r{i}") == expected(prompt(100, i), 200)


def test_the_queue_is_bounded_and_says_so() -> None:
    house = build(Residency.HISPARSE, device_pages=60, queue_limit=3)
    for i in range(3):
        house.submit(Request(f"r{i}", prompt(10), 2))
    with pytest.raises(RequestError) as refused:
        house.submit(Request("r3", prompt(10), 2))
    assert str(refused.value) == (
        "OVERLOADED id=r3 retry_after_ms=5000 3 requests wait already; this deployment queues 3 (queue_limit)"
    )
    house.scheduler.start()
    for i in range(3):
        house.wait(f"r{i}")
    house.submit(Request("r3", prompt(10), 2))
    assert house.wait("r3").finish is FinishReason.LENGTH
    house.scheduler.stop(0)
    house.transfers.close()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("r", prompt(0), 5), "the prompt is empty"),
        (Request("r", prompt(5), 0), "max_tokens=0 must be at least 1"),
        (Request("r", prompt(5), -3), "max_tokens=-3 must be at least 1"),
        (Request("r", np.array([5, VOCAB], dtype=np.int32), 5), "outside the vocabulary, 0 to 96"),
        (
            Request("r", prompt(350), 51),
            "max_tokens=51 with a 350-token prompt needs 401 positions; this deployment holds 400 (max_model_len)",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_twice_alike(house: House, request_: Request, words: str) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^INVALID_ARGUMENT id=r ") as refused:
            house.submit(request_)
        assert words in str(refused.value)
    house.assert_empty()


def test_an_id_in_use_is_refused_and_free_again_afterwards(house: House) -> None:
    house.engine.gate.clear()
    house.submit(Request("same", prompt(10), 5))
    with pytest.raises(RequestError, match="already in use"):
        house.scheduler.submit(Request("same", prompt(10), 5), lambda _: None)
    house.engine.gate.set()
    house.wait("same")
    house.submit(Request("same", prompt(20), 5))
    house.wait("same")
    assert house.tokens("same") == expected(prompt(20), 5)


def test_a_failed_step_fails_its_requests_and_no_others(house: House) -> None:
    house.engine.gate.clear()
    house.submit(Request("in the step", prompt(10), 50))
    house.engine.fail_next = True
    house.engine.gate.set()
    error = house.wait("in the step").error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL
    assert str(error) == "INTERNAL id=in the step the step failed: ArithmeticError: asked to fail"
    house.submit(Request("later", prompt(40), 20))
    house.wait("later")
    assert house.tokens("later") == expected(prompt(40), 20)
    assert house.scheduler.alive


def test_stopping_lets_running_requests_finish_and_cancels_what_is_too_late() -> None:
    house = build(Residency.HISPARSE, device_pages=60)
    house.scheduler.start()
    house.submit(Request("quick", prompt(20), 10))
    house.scheduler.stop(drain_seconds=30)
    assert house.tokens("quick") == expected(prompt(20), 10)
    with pytest.raises(RequestError, match="OVERLOADED id=late the server is stopping"):
        house.submit(Request("late", prompt(5), 5))
    house.assert_empty()
    house = build(Residency.HISPARSE, device_pages=60, slots=2)
    for i in range(6):
        house.submit(Request(f"r{i}", prompt(100, i), 300))
    house.scheduler.start()
    house.wait_for("decoding")
    house.scheduler.stop(drain_seconds=0)
    assert all(house.wait(f"r{i}").finish is FinishReason.CANCELLED for i in range(6))
    house.transfers.close()
    house.assert_empty()


def test_a_broken_hierarchy_ends_every_request_with_the_reason() -> None:
    house = build(Residency.HISPARSE, device_pages=60)
    house.engine.gate.clear()
    house.scheduler.start()
    house.submit(Request("first", prompt(50), 50))
    house.submit(Request("second", prompt(50), 50))
    house.transfers.stream.close()
    house.transfers.backup = None  # type: ignore[assignment,method-assign]
    house.engine.gate.set()
    for name in ("first", "second"):
        assert str(house.wait(name).error).startswith(f"INTERNAL id={name} the scheduler has failed: TypeError")
    assert not house.scheduler.alive
    with pytest.raises(RequestError, match="INTERNAL id=third the scheduler has failed"):
        house.submit(Request("third", prompt(5), 5))


def test_a_stop_sequence_ends_a_request_with_its_tokens_delivered(house: House) -> None:
    whole = expected(prompt(20), 30)
    stop = tuple(whole[10:12])
    first = next(i for i in range(30) if tuple(whole[i : i + 2]) == stop)
    house.submit(Request("r", prompt(20), 30, stop_sequences=(stop,)))
    assert house.wait("r").finish is FinishReason.STOP
    assert house.tokens("r") == whole[: first + 2]


def test_end_ids_wait_for_the_least_number_of_tokens(house: House) -> None:
    end = expected(prompt(20), 1)[0]
    house.submit(Request("at once", prompt(20), 30, end_ids=frozenset({end})))
    assert house.wait("at once").finish is FinishReason.STOP
    assert house.tokens("at once") == [end]
    house.submit(Request("later", prompt(20), 30, end_ids=frozenset({end}), min_tokens=5))
    house.wait("later")
    tokens = house.tokens("later")
    assert end not in tokens[:5]
    assert len(tokens) >= 5


def test_a_reader_that_has_all_it_wants_ends_its_request_well(house: House) -> None:
    house.submit(Request("r", prompt(20), 350))
    house.wait_for("decoding")
    house.scheduler.finish("r")
    last = house.wait("r")
    assert (last.finish, last.error) == (FinishReason.STOP, None)


def test_deadlines_end_requests_that_wait_and_that_run(house: House) -> None:
    house.engine.gate.clear()
    for i in range(8):
        house.submit(Request(f"r{i}", prompt(100, i), 200))
    house.submit(Request("waits", prompt(100), 200, deadline_ms=50))
    house.submit(Request("in time", prompt(10), 2, deadline_ms=60_000))
    time.sleep(0.06)
    house.engine.gate.set()
    error = house.wait("waits").error
    assert error is not None
    assert error.code is ErrorCode.DEADLINE_EXCEEDED
    assert str(error).startswith("DEADLINE_EXCEEDED id=waits deadline_ms=50 has passed: still waiting, one of ")
    for name in [*(f"r{i}" for i in range(8)), "in time"]:
        assert house.wait(name).error is None
    house.engine.gate.clear()
    house.submit(Request("runs", prompt(100), 200, deadline_ms=50))
    house.submit(Request("neighbour", prompt(50), 20))
    time.sleep(0.06)
    house.engine.gate.set()
    error = house.wait("runs").error
    assert error is not None
    assert "has passed: " in str(error)
    assert house.wait("neighbour").error is None
    assert house.tokens("neighbour") == expected(prompt(50), 20)


def test_urgent_requests_are_admitted_first() -> None:
    house = build(Residency.HISPARSE, device_pages=60, slots=1)
    order: list[str] = []
    for name, priority in (("later", 8), ("default", 5), ("urgent", 0)):
        request = Request(name, prompt(20), 3, priority=priority)
        house.outputs[name], house.over[name] = [], threading.Event()

        def deliver(output: Output, name: str = name) -> None:
            if output.finish is not None:
                order.append(name)
            house._deliver(output)

        house.scheduler.submit(request, deliver)
    house.scheduler.start()
    for name in ("later", "default", "urgent"):
        house.wait(name)
    assert order == ["urgent", "default", "later"]
    house.scheduler.stop(5)
    assert house.scheduler.snapshot().totals.overtakes == 3
    house.transfers.close()


def test_a_prompt_is_scored_alike_in_any_chunks_and_beside_others() -> None:
    """The engine's logits are 1 for the right token and 0 for the others."""
    right = float(1 - np.log(np.e + VOCAB - 1))
    wrong = float(-np.log(np.e + VOCAB - 1))
    text = prompt(200, 4)
    text[100] = next(iter(expected(text[:100], 1)))
    hits = [expected(text[:i], 1)[0] == text[i] for i in range(1, len(text))]
    for chunk in (7, 24, 512):
        house = build(Residency.HISPARSE, device_pages=60, chunk=chunk)
        house.submit(Request("scored", text, 0, score_prompt=True))
        house.submit(Request("beside", prompt(30), 10))
        house.submit(Request("both", text, 4, score_prompt=True))
        house.scheduler.start()
        for name, generated in (("scored", []), ("both", expected(text, 4))):
            assert house.wait(name).finish is FinishReason.LENGTH
            assert house.tokens(name) == generated
            (scores,) = [o.prompt_logprobs for o in house.outputs[name] if o.prompt_logprobs is not None]
            assert scores.dtype == np.float32
            assert np.allclose(scores, np.where(hits, right, wrong), atol=1e-6)
        assert hits[99]
        house.wait("beside")
        assert house.tokens("beside") == expected(prompt(30), 10)
        house.scheduler.stop(5)
        house.transfers.close()
        house.assert_empty()


def test_log_probabilities_come_with_their_tokens(house: House) -> None:
    house.submit(Request("r", prompt(20), 12, logprobs=2))
    house.wait("r")
    entries = [entry for output in house.outputs["r"] for entry in output.logprobs]
    assert [entry.token for entry in entries] == house.tokens("r") == expected(prompt(20), 12)
    assert all(entry.rank == 1 and entry.top[0][0] == entry.token for entry in entries)
    assert np.allclose([entry.logprob for entry in entries], 1 - np.log(np.e + VOCAB - 1))


def test_a_request_that_may_choose_nothing_fails_alone(house: House) -> None:
    house.submit(Request("r", prompt(20), 12, bad_sequences=tuple((token,) for token in range(VOCAB))))
    house.submit(Request("neighbour", prompt(30), 12))
    error = house.wait("r").error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL
    house.wait("neighbour")
    assert house.tokens("neighbour") == expected(prompt(30), 12)


def test_a_copy_that_hangs_fails_its_request_and_says_so() -> None:
    house = build(Residency.HISPARSE, device_pages=60, transfer_timeout=1.0)
    stuck = threading.Event()
    really = house.transfers.backup

    class Never:
        def done(self) -> bool:
            return stuck.is_set()

    def hang_once(device_pages: Int32, host_pages: Int32, after: Fence) -> Fence:
        if len(device_pages) > 1:  # history; the session can't go on without the first page of its tail
            return really(device_pages, host_pages, after)
        house.transfers.backup = really  # type: ignore[method-assign]
        return Never()

    house.transfers.backup = hang_once  # type: ignore[method-assign]
    house.scheduler.start()
    house.submit(Request("hangs", prompt(100), 200))
    house.wait_for("decoding")
    while not (waits := house.scheduler.describe()).startswith("hangs waits for "):
        assert not house.over["hangs"].is_set(), waits
    house.submit(Request("neighbour", prompt(50), 100))
    error = house.wait("hangs").error
    assert error is not None
    assert str(error).startswith("INTERNAL id=hangs copying 1 of its pages to the host has taken 1.")
    house.wait("neighbour")
    assert house.tokens("neighbour") == expected(prompt(50), 100)
    stuck.set()
    house.scheduler.stop(5)
    house.transfers.close()
    house.assert_empty()


def test_a_request_that_waits_for_memory_says_what_is_short(house: House) -> None:
    describe = house.scheduler.describe
    for i in range(4):
        house.submit(Request(f"r{i}", prompt(200, i), 150))
    deadline = time.monotonic() + 30
    while not re.search("is next in the queue and waits for device pages: 30 needed, .* of 60", said := describe()):
        assert time.monotonic() < deadline, said
        time.sleep(0.001)


def test_a_failed_copy_fails_its_request_and_no_others() -> None:
    house = build(Residency.ADAPTIVE, device_pages=40)
    pool = house.transfers.pool.sources
    house.scheduler.start()
    house.submit(Request("loses", prompt(160), 200))
    house.wait_for("decoding")
    house.transfers.pool.sources = []
    house.submit(Request("needs room", prompt(160, 1), 60))
    error = house.wait("loses").error
    house.transfers.pool.sources = pool
    assert error is not None
    assert "copying its rows to the host failed" in str(error)
    house.wait("needs room")
    assert house.tokens("needs room") == expected(prompt(160, 1), 60)
    house.scheduler.stop(5)
    house.transfers.close()
    house.assert_empty()


class Nuisance:
    """Copies of which some fail, chosen by a seed."""

    def __init__(self, transfers: CpuTransfers, rng: np.random.Generator) -> None:
        self._transfers = transfers
        self._rng = rng

    def backup(self, device_pages: Int32, host_pages: Int32, after: Fence) -> Fence:
        return self._perhaps(self._transfers.backup(device_pages, host_pages, after))

    def refill(self, host_pages: Int32, device_pages: Int32, after: Fence) -> Fence:
        return self._perhaps(self._transfers.refill(host_pages, device_pages, after))

    def _perhaps(self, fence: Fence) -> Fence:
        return FailedFence(fence) if self._rng.random() < 0.01 else fence


@dataclass
class FailedFence:
    """A copy that fails when it is over."""

    fence: Fence

    def done(self) -> bool:
        if self.fence.done():
            raise OSError("injected")
        return False


@pytest.mark.parametrize("requests", [400, pytest.param(5000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_random_requests_all_end_with_a_result_or_a_reason(requests: int) -> None:
    rng = np.random.default_rng(17)
    house = build(Residency.ADAPTIVE, device_pages=50, slots=8, queue_limit=requests)
    house.hierarchy._movement._transfers = Nuisance(house.transfers, rng)
    house.scheduler.start()
    made: list[Request] = []
    for number in range(requests):
        length = int(rng.integers(1, 250))
        request = Request(
            f"r{number}",
            prompt(length, number),
            int(rng.integers(1, MAX_LEN - length)),
            priority=int(rng.integers(0, 10)),
            deadline_ms=int(rng.integers(1, 60_000)) if rng.random() < 0.2 else None,
        )
        made.append(request)
        house.submit(request)
        if rng.random() < 0.2:
            house.scheduler.cancel(f"r{int(rng.integers(0, number + 1))}")
    causes: dict[str, int] = {}
    for request in made:
        last = house.wait(request.id)
        assert sum(output.finish is not None for output in house.outputs[request.id]) == 1
        whole = expected(request.prompt, request.max_tokens)
        made_tokens = house.tokens(request.id)
        assert made_tokens == (whole if last.error is None else whole[: len(made_tokens)])
        cause = last.error.code.value if last.error is not None else str(last.finish)
        causes[cause] = causes.get(cause, 0) + 1
        assert cause in ("length", "CANCELLED", "DEADLINE_EXCEEDED") or "OSError: injected" in str(last.error)
    assert {"length", "CANCELLED", "INTERNAL"} <= causes.keys(), causes
    house.scheduler.stop(5)
    house.transfers.close()
    house.assert_empty()
    assert house.hierarchy.moved.failures > 0
