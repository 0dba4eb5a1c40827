"""Who is next: priority classes that age, and a bound on overtaking."""

from __future__ import annotations

import numpy as np

from trt_backend.request import Request, RequestTimes
from trt_backend.scheduler.intake import Waiting
from trt_backend.scheduler.queue import AGEING_SECONDS, MAX_OVERTAKES, WaitingQueue

SECOND = 1_000_000_000


class Clock:
    """Time as the test says it is."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def waiting(name: str, priority: int, arrival: int = 0) -> Waiting:
    request = Request(name, np.array([1], dtype=np.int32), 1, priority=priority)
    return Waiting(request, lambda _: None, RequestTimes(arrival_ns=arrival))


def drain(queue: WaitingQueue) -> list[str]:
    names = []
    while (head := queue.head()) is not None:
        queue.pop(head)
        names.append(head.request.id)
    return names


def test_urgent_classes_come_first_and_each_is_first_come_first_served() -> None:
    queue = WaitingQueue(Clock())
    for number, (name, priority) in enumerate([("c1", 7), ("a1", 2), ("c2", 7), ("a2", 2), ("b", 5)]):
        queue.push(waiting(name, priority, number))
    assert len(queue) == 5
    assert drain(queue) == ["a1", "a2", "b", "c1", "c2"]
    assert queue.overtakes == 3 + 0  # c1 by a1, a2 and b; c2 waits behind c1 anyway


def test_waiting_makes_a_request_as_urgent_as_a_later_one_of_a_better_class() -> None:
    clock = Clock()
    queue = WaitingQueue(clock)
    queue.push(waiting("patient", 5))
    clock.now = int(2.5 * AGEING_SECONDS * SECOND)
    queue.push(waiting("urgent", 3, clock.now))
    assert drain(queue) == ["patient", "urgent"]
    clock.now = 0
    queue.push(waiting("patient", 5))
    clock.now = int(1.5 * AGEING_SECONDS * SECOND)
    queue.push(waiting("urgent", 3, clock.now))
    assert drain(queue) == ["urgent", "patient"]


def test_a_stream_of_urgent_requests_overtakes_so_often_and_no_oftener() -> None:
    queue = WaitingQueue(Clock())
    patient = waiting("patient", 9)
    queue.push(patient)
    served = []
    for number in range(1, 2 * MAX_OVERTAKES):
        queue.push(waiting(f"urgent{number}", 0, number))
        head = queue.head()
        assert head is not None
        queue.pop(head)
        served.append(head.request.id)
    assert served.index("patient") == MAX_OVERTAKES
    assert patient.overtaken == MAX_OVERTAKES


def test_a_request_that_gave_up_is_passed_by() -> None:
    queue = WaitingQueue(Clock())
    gone = waiting("gone", 1)
    queue.push(gone)
    queue.push(waiting("stays", 5, 1))
    queue.remove(gone)
    assert [one.request.id for one in queue] == ["stays"]
    assert drain(queue) == ["stays"]
    assert queue.head() is None
