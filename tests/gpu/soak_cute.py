"""Random calls of the CuTe-DSL forward for minutes, from two threads on two streams, with a watch for calls that hang.

    python tests/gpu/soak_cute.py --seconds 600

Every call is held to the bits of the same call before, or a little later; now and then one of many calls ago is made
again, or a result is held to the float64 oracle. Exits with 0 ("ok"), 1 where a result is wrong, or 2 where a thread
makes no progress for a minute; in both it says for which call, and the seed that repeats it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from ffpa_jit import ffpa_attn_func, warm
from ffpa_jit.cute.spec import HEAD_DIMS
from tests import oracle
from tests.gpu.random_calls import DTYPES, RandomCall, random_call

KEPT = 12  # calls of each thread that are made again
EVERY_CHECKED, EVERY_LARGE, EVERY_AGAIN = 8, 25, 3
LARGEST_CHECKED = 2**24  # scores
_drawing = threading.Lock()  # torch's generator belongs to all threads


def attend(tensors: tuple[torch.Tensor, ...], call: RandomCall) -> tuple[torch.Tensor, torch.Tensor]:
    return ffpa_attn_func(
        *tensors, is_causal=call.shape.is_causal, scale=call.scale, enable_gqa=call.shape.enable_gqa,
        backend="cutedsl", return_lse=True,
    )  # fmt: skip


class Worker(threading.Thread):
    """Makes calls on a stream of its own until `stop`. `doing`, `since`: the current call and when it was begun."""

    def __init__(self, number: int, seed: int, stop: threading.Event) -> None:
        super().__init__(name=f"worker {number}", daemon=True)
        self.draw = random.Random(f"{seed} {number}")
        self.stop = stop
        self.doing, self.since = "nothing yet", time.monotonic()
        self.calls = self.checked = self.again = 0
        self.worst = dict.fromkeys(DTYPES, 0.0)
        self.error: str | None = None
        self.kept: list[tuple[RandomCall, tuple, tuple]] = []

    def run(self) -> None:
        try:
            self.stream = torch.cuda.Stream()
            with torch.cuda.stream(self.stream):
                while not self.stop.is_set():
                    self._step()
        except BaseException as error:
            self.error = f"{self.doing}: {type(error).__name__}: {error}"
            self.stop.set()

    def _begin(self, call: RandomCall) -> None:
        self.doing, self.since = f"call {self.calls}: {call}", time.monotonic()

    def _results(self, tensors: tuple, call: RandomCall, times: int) -> tuple:
        """Of a call, made as often as that before any is waited for; all of them the same."""
        results = [attend(tensors, call) for _ in range(times)]
        self.stream.synchronize()
        self.calls += times
        self.since = time.monotonic()
        for result in results[1:]:
            self._compare(result, results[0])
        return results[0]

    def _compare(self, result: tuple, expected: tuple) -> None:
        for name, a, b in zip(("out", "lse"), result, expected, strict=True):
            assert not torch.isnan(a).any(), f"NaN in {name}"
            assert torch.equal(a, b), f"{name} differs from that of the same call in {int((a != b).sum())} places"

    def _step(self) -> None:
        draw = self.draw
        large = {"rows": 5000, "keys": 9000, "scores": 2**28} if draw.random() < 1 / EVERY_LARGE else {}
        call = random_call(draw, **large)
        self._begin(call)
        with _drawing:
            tensors = call.inputs("cuda")
        first = self._results(tensors, call, draw.choice((1, 2, 2, 5)))
        shape = call.shape
        small = shape.batch * shape.heads_q * shape.len_q * shape.len_kv <= LARGEST_CHECKED
        if small and draw.random() < 1 / EVERY_CHECKED:
            self._check(tensors, call, first)
        if self.kept and draw.random() < 1 / EVERY_AGAIN:
            call_before, tensors_before, expected = draw.choice(self.kept)
            self._begin(call_before)
            self._compare(self._results(tensors_before, call_before, 1), expected)
            self.again += 1
        if len(self.kept) < KEPT:
            self.kept.append((call, tensors, first))
        else:
            self.kept[draw.randrange(KEPT)] = call, tensors, first

    def _check(self, tensors: tuple, call: RandomCall, result: tuple) -> None:
        options = {"is_causal": call.shape.is_causal, "scale": call.scale}
        oracle.check(*tensors, out=result[0], lse=result[1], **options)
        error = oracle.relative_error(result[0], oracle.attention(*tensors, **options).out)
        self.worst[call.dtype] = max(self.worst[call.dtype], error)
        self.checked += 1
        self.since = time.monotonic()


def watch(workers: list[Worker], deadline: float, patience: float, stop: threading.Event) -> None:
    """Until it is time to stop; ends the process if a worker hangs, which nothing else can."""
    told = time.monotonic()
    while any(worker.is_alive() for worker in workers):
        now = time.monotonic()
        if now > deadline:
            stop.set()
        hung = [worker for worker in workers if worker.is_alive() and now - worker.since > patience]
        if hung:
            for worker in hung:
                print(f"hung: {worker.name}, {now - worker.since:.0f} s in {worker.doing}", flush=True)
            faulthandler.dump_traceback()
            os._exit(2)
        if now - told > 30:
            told = now
            print(f"{sum(worker.calls for worker in workers)} calls", flush=True)
        time.sleep(0.2)


def report(workers: list[Worker], seconds: float, seed: int) -> int:
    calls, checked, again = (sum(getattr(each, name) for each in workers) for name in ("calls", "checked", "again"))
    worst = ", ".join(
        f"{str(dtype).removeprefix('torch.')} {max(each.worst[dtype] for each in workers):.2e}" for dtype in DTYPES
    )
    print(f"{calls} calls in {seconds:.0f} s, seed {seed}: {again} made again later, {checked} held to the oracle")
    print(f"worst relative error: {worst}")
    failed = [worker for worker in workers if worker.error is not None]
    for worker in failed:
        print(f"wrong: {worker.name}, {worker.error}")
    if not failed:
        print("ok")
    return int(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random calls of the CuTe-DSL forward for a while.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without progress that are a hang")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(31)
    results = warm(list(HEAD_DIMS), dtype=("bf16", "fp16"), backend="cutedsl")
    failed = [result for result in results if result.failed]
    if failed or not results:
        print(f"wrong: not all kernels compile: {failed}")
        return 1
    print(f"{len(results)} kernels, {options.threads} threads, seed {seed}", flush=True)
    stop, start = threading.Event(), time.monotonic()
    workers = [Worker(i, seed, stop) for i in range(options.threads)]
    for worker in workers:
        worker.start()
    watch(workers, start + options.seconds, options.patience, stop)
    return report(workers, time.monotonic() - start, seed)


if __name__ == "__main__":
    sys.exit(main())
