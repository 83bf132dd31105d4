"""Somebody else's codec, seen from here: a process of its own with a time and a memory limit, so that its crash is a finding and not ours."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proofs_checks.conform import worker

Array = NDArray[Any]
WORKER = Path(worker.__file__).resolve()


class ForeignError(Exception):
    """The codec raised. error: the exception's name; kinds: those of its bases; stage: "load", "build", "encode", "decode"."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.error, self.kinds = answer["error"], tuple(answer["kinds"])
        self.message, self.stage = answer["message"], answer["stage"]
        super().__init__(f"{self.stage} raised {self.error}: {self.message}"[:300])


class Died(ForeignError):
    """The codec's process ended by itself, or was ended at its time limit."""

    def __init__(self, what: str, stage: str) -> None:
        super().__init__({"error": what, "kinds": (), "message": "", "stage": stage})
        self.args = (f"{what} in {stage}",)


@dataclass(frozen=True)
class Through:
    """What came of one round trip. held: bytes of all that encode gave back; raw: these bytes themselves, of each call of encode, where asked for."""

    keys: Array
    values: Array
    held: int
    digest: str
    is_bytes: bool
    changed: bool
    says: tuple[float, ...] = ()
    raw: tuple[bytes, ...] = ()


@dataclass
class Subject:
    """The codec named `spec`, "package.module:Name" or "file.py:Name", built with `arguments`.

    python: interpreter of its process (default this one); paths: folders put first on its path; timeout: seconds a request may take;
    memory: GiB of address space, 0 for no limit; threads: of its linear algebra; fit: Name.fit(calibration layers, **arguments).
    """

    spec: str
    arguments: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    paths: tuple[str, ...] = ()
    timeout: float = 60.0
    memory: float = 16.0
    threads: int = 1
    fit: bool = False
    deaths: int = 0

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self.about: dict[str, Any] = {}

    def with_threads(self, threads: int) -> Subject:
        """The same codec in another process."""
        other = Subject(
            self.spec, self.arguments, self.python, self.paths, self.timeout, self.memory, threads, self.fit
        )
        return other

    # -- the process -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtheory-conform-")
        root = str(WORKER.parents[2])
        environment = dict(os.environ)
        paths = [str(Path(path).resolve()) for path in self.paths]
        if Path(self.python).resolve() == Path(sys.executable).resolve() or any(
            self.spec.startswith(name) for name in ("reference:", "reference.")
        ):
            paths.append(root)
        elif "PYTHONPATH" in environment:
            paths.append(environment["PYTHONPATH"])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment["PATH"] = os.pathsep.join([str(Path(self.python).absolute().parent), environment.get("PATH", "")])
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(self.threads)
        self._log = open(Path(self._folder.name, "log"), "w+")  # noqa: SIM115 as long as the process
        command = [self.python, str(WORKER), self._folder.name, str(self.threads), str(self.memory)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        self._lines = queue.Queue()
        threading.Thread(target=self._read, args=(self._process.stdout, self._lines), daemon=True).start()
        self.about = self._ask("load", [], 3 * self.timeout, spec=self.spec, arguments=self.arguments, fit=self.fit)[0]

    @staticmethod
    def _read(source: Any, lines: queue.Queue[str]) -> None:
        with contextlib.suppress(ValueError):  # closed while it is read
            for line in source:
                lines.put(line)
        lines.put("")

    def _ask(self, do: str, arrays: list[Array], timeout: float, **request: Any) -> tuple[dict[str, Any], list[Array]]:
        assert self._process is not None and self._process.stdin is not None and self._folder is not None
        folder = Path(self._folder.name)
        records = worker.pack(folder / "in.bin", arrays)
        try:
            print(json.dumps({"do": do, "arrays": records, **request}), file=self._process.stdin, flush=True)
            line = self._lines.get(timeout=timeout)
        except (BrokenPipeError, OSError):
            line = ""
        except queue.Empty:
            self.close()
            self.deaths += 1
            raise Died(f"took more than {timeout:g} s", do) from None
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            last = self._log.read().strip().splitlines()[-1:]
            self.close()
            self.deaths += 1
            raise Died(f"the process ended with status {code}{': ' + last[0][:200] if last else ''}", do)
        answer = json.loads(line)
        if "error" in answer:
            raise ForeignError(answer)
        return answer, worker.unpack(folder / "out.bin", answer["arrays"])

    def ask(self, do: str, arrays: list[Array] | None = None, **request: Any) -> tuple[dict[str, Any], list[Array]]:
        """One request; ForeignError for what the codec raised, Died (one too) for a process that did not live to answer."""
        if self._process is None:
            self._start()
        return self._ask(do, arrays or [], self.timeout, **request)

    def close(self) -> None:
        """End the process; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            self._log.close()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests --------------------------------------------------------------------------------------------------------

    def through(self, keys: Array, values: Array, *, keep: bool = False, fresh: bool = False, shared: bool = False, layout: str = "", **options: Any) -> Through:  # fmt: skip
        """keys (heads, tokens, dim) and values (heads, tokens, value_dim), encoded and decoded.

        fresh: decoded by a codec that has not encoded them. shared: objects that two encodings share are not counted as held. layout: see worker. options: "seed", "bits", "power" of the calibration.
        """
        answer, arrays = self.ask(
            "through", [keys, values], options=options, fresh=fresh, keep=keep, shared=shared, layout=layout
        )
        raw = tuple(one.tobytes() for one in arrays[2:])
        return Through(
            arrays[0], arrays[1], answer["held"], answer["digest"], answer["bytes"], answer["changed"], tuple(answer["says"]), raw
        )  # fmt: skip

    def decode(self, data: bytes, heads: int, dim: int, value_dim: int) -> list[Array]:
        """Whatever the codec makes of these bytes."""
        return self.ask(
            "decode", [np.frombuffer(data, np.uint8)], heads=heads, dim=dim, value_dim=value_dim
        )[1]  # fmt: skip
