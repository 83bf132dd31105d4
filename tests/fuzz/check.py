"""What is asked of every mutant: one of the promised errors or an honest result, within a second, in little memory.

Errors      CorruptStream with an offset inside, StateMismatch; of cache files CorruptCache. A warning counts as an exception.
Time        wall clock of each decode: at most a second, and one more for each SPEED bytes that it decodes to. One that takes longer
            is tried twice more, and counts if its fastest does; an alarm ends what takes over TIMEOUT.
Allocation  the peak that tracemalloc sees while a mutant is decoded, beside 8 times the honest size, that is

                8 max(peak of decoding the unmutated seed, bytes of what the mutant itself decodes to) + SPARE

            where the peak counts in proportion for a mutant of more bytes than its seed, as an honest stream of them would take it,
            on every 50th mutant, on all that take over 10 ms, and on all that run into the address-space limit set for every one at
            CAP above what the process has at rest. SPARE is for tables of dimensions that the seed does not have: rotations and
            sketches of up to 1024 x 1024 numbers, which are kept, so a second decode is asked that finds them there.

A mutant that decodes, to more than its seed did, is no offence by itself: a format that codes certain symbols in no bits says much in
few bytes, as an honest encoder would. The largest such expansion of each codec is recorded beside the counts.
"""

from __future__ import annotations

import resource
import signal
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvtheory
import reference
from kvtheory.layer.store import CorruptCache
from reference import CorruptStream, StateMismatch
from tests.fuzz.mutations import Mutant
from tests.fuzz.seeds import Seed

SECONDS, SPEED, TIMEOUT = 1.0, 4 << 20, 20.0
EVERY, SLOW = 50, 0.010
SPARE = 1 << 20
CAP = 256 << 20


class Hang(KeyboardInterrupt):
    """Raised by the alarm; decoders let KeyboardInterrupt through."""


@dataclass
class Offence:
    """kind: "exception", "warning", "offset", "time", "memory", "crash"; what: the details."""

    kind: str
    what: str


@dataclass
class Tally:
    """Counts of one chunk, by "codec entry outcome"; the slowest decode and the largest peak beside its limit, by codec and entry."""

    counts: dict[str, int] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)
    nearest: dict[str, float] = field(default_factory=dict)
    #: bytes decoded to for each byte of stream and state
    expansion: dict[str, float] = field(default_factory=dict)
    traced: int = 0

    def add(self, other: Tally) -> None:
        for key, count in other.counts.items():
            self.counts[key] = self.counts.get(key, 0) + count
        for name in ("slowest", "nearest", "expansion"):
            own = getattr(self, name)
            for key, value in getattr(other, name).items():
                own[key] = max(own.get(key, 0.0), value)
        self.traced += other.traced


def size_of(decoded: Any) -> int:
    """Bytes of the arrays of Decoded, Layer, or lists of them; 0 of anything else."""
    if isinstance(decoded, (list, tuple)):
        return sum(map(size_of, decoded))
    names = ("keys", "values", "log_weights", "positions", "kept")
    return sum(getattr(getattr(decoded, name, None), "nbytes", 0) for name in names)


def finite(decoded: Any) -> bool:
    """Whether all keys and values of Decoded, or of lists of them, are finite; True of anything else."""
    if isinstance(decoded, (list, tuple)):
        return all(map(finite, decoded))
    return all(
        bool(np.isfinite(a).all())
        for a in (getattr(decoded, n, None) for n in ("keys", "values"))
        if isinstance(a, np.ndarray)
    )


class Checker:
    """Decodes mutants of these seeds and says what is wrong. One a process: it sets an alarm, and limits the address space."""

    def __init__(self, seeds: Sequence[Seed], files: Sequence[bytes] = (), limit: bool = True) -> None:
        self.seeds, self.files, self._limit = seeds, files, limit
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "cache"
        self._honest: dict[tuple[int, str], int] = {}
        self._checked = 0
        self.tally = Tally()

    def close(self) -> None:
        self._folder.cleanup()

    # -- one mutant ----------------------------------------------------------------------------------------------------

    def _call(self, mutant: Mutant) -> Callable[[], Any]:
        data, state, entry = mutant.data, mutant.state, mutant.entry
        if entry == "file":
            return self._load_file
        if entry == "load":
            return lambda: reference.load(data)
        if entry == "inspect":
            return lambda: reference.inspect(data)
        if entry == "decode":
            return lambda: reference.decode(data, state)
        codec = self.seeds[mutant.seed].codec
        return lambda: codec.decode(data) if entry == "codec" else reference.decode_cache(codec, data)

    def _load_file(self) -> Any:
        cache = kvtheory.Cache.load(self._path)
        return [cache[i] for i in range(len(cache))]

    def name(self, mutant: Mutant) -> str:
        return f"{'Cache' if mutant.entry == 'file' else self.seeds[mutant.seed].codec.codec_id} {mutant.entry}"

    def check(self, mutant: Mutant) -> Offence | None:
        """None where all is well; counts it either way."""
        self._checked += 1
        name = self.name(mutant)
        if mutant.entry == "file":
            self._path.write_bytes(mutant.data)
        call, longest = self._call(mutant), len(mutant.data) + len(mutant.state)
        began = time.perf_counter()
        outcome, offence, decoded = self._attempt(call, longest)
        took = time.perf_counter() - began
        if offence is None and not finite(decoded):
            offence = Offence("numbers", "NaN or inf decoded")
        allowed = SECONDS + size_of(decoded) / SPEED
        if took > allowed and (offence is None or offence.kind == "time"):
            took = min(took, *(self._timed(call, longest) for _ in range(2)))
            offence = Offence("time", f"{took:.2f} s") if took > allowed else None
        limited = outcome == "MemoryError"
        if offence is None or limited:
            size = size_of(decoded)
            self._most("expansion", name, size / max(1, longest))
            if took > SLOW or limited or self._checked % EVERY == 0:
                offence = self._measured(mutant, name, call, size)
                outcome = outcome if offence is None else offence.kind
        decoded = None
        self._most("slowest", name, took)
        key = f"{name} {outcome if offence is None else 'OFFENCE ' + offence.kind}"
        self.tally.counts[key] = self.tally.counts.get(key, 0) + 1
        return offence

    def _attempt(self, call: Callable[[], Any], longest: int) -> tuple[str, Offence | None, Any]:
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT)
        try:
            return "decoded", None, call()
        except CorruptStream as problem:
            if not 0 <= problem.offset <= longest:
                return "corrupt", Offence("offset", f"{problem}"), None
            return "corrupt", None, None
        except StateMismatch:
            return "mismatch", None, None
        except CorruptCache:
            return "corrupt", None, None
        except Hang:
            return "time", Offence("time", f"over {TIMEOUT} s"), None
        except Warning as problem:
            return "warning", Offence("warning", f"{type(problem).__name__}: {problem}"), None
        except MemoryError as problem:
            return "MemoryError", Offence("memory", f"over {CAP} bytes: {problem}"), None
        except BaseException as problem:
            return "exception", Offence("exception", f"{type(problem).__name__}: {problem}"), None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _timed(self, call: Callable[[], Any], longest: int) -> float:
        began = time.perf_counter()
        self._attempt(call, longest)
        return time.perf_counter() - began

    def _most(self, what: str, name: str, value: float) -> None:
        own = getattr(self.tally, what)
        own[name] = max(own.get(name, 0.0), value)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _peak(self, call: Callable[[], Any]) -> tuple[int, Any, str]:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            outcome, _, decoded = self._attempt(call, 1 << 62)
            return tracemalloc.get_traced_memory()[1] - before, decoded, outcome
        finally:
            tracemalloc.stop()

    def honest(self, mutant: Mutant) -> int:
        """Peak of the same entry on the unmutated seed, tables made."""
        key = (mutant.seed, mutant.entry)
        if key not in self._honest:
            if mutant.entry == "file":
                whole = Mutant(mutant.seed, "file", self.files[-1 - mutant.seed])
                held = self._path.read_bytes()
                self._path.write_bytes(whole.data)
            else:
                seed = self.seeds[mutant.seed]
                whole = Mutant(
                    mutant.seed, mutant.entry, seed.state if mutant.entry == "load" else seed.data, seed.state
                )
            call = self._call(whole)
            self._peak(call)
            self._honest[key] = self._peak(call)[0]
            if mutant.entry == "file":
                self._path.write_bytes(held)
        return self._honest[key]

    def _length(self, mutant: Mutant) -> int:
        """Bytes of the seed."""
        if mutant.entry == "file":
            return len(self.files[-1 - mutant.seed])
        seed = self.seeds[mutant.seed]
        return len(seed.state if mutant.entry == "load" else seed.data)

    def _measured(self, mutant: Mutant, name: str, call: Callable[[], Any], size: int) -> Offence | None:
        self.tally.traced += 1
        with self.limited(8 * CAP):
            longer = max(1.0, len(mutant.data) / max(1, self._length(mutant)))
            limit = int(8 * max(longer * self.honest(mutant), size)) + SPARE
            peak, decoded, outcome = self._peak(call)
            limit = max(limit, 8 * size_of(decoded) + SPARE)
            if peak > limit:  # tables may have been made
                peak, _, outcome = self._peak(call)
        self._most("nearest", name, peak / limit)
        if peak > limit or outcome == "MemoryError":
            return Offence("memory", f"peak {peak} bytes, {outcome}, over {limit}; honest {self.honest(mutant)}")
        return None

    # -- the process ---------------------------------------------------------------------------------------------------

    @contextmanager
    def limited(self, above: int = CAP) -> Iterator[None]:
        """Address space of at most so much more than now."""
        if not self._limit:
            yield
            return
        before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + above, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Alarm, warnings as errors, limited address space: `check` inside of this."""

        def ring(*_: Any) -> None:
            raise Hang

        before = signal.signal(signal.SIGALRM, ring)
        try:
            with warnings.catch_warnings(), self.limited():
                warnings.simplefilter("error")
                yield
        finally:
            signal.signal(signal.SIGALRM, before)
