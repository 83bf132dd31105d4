"""Properties of sizes, element types and refusals: what a codec takes, and how it says what it does not take."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np

from proofs_checks.conform.instances import Instance, Sizes, instances
from proofs_checks.conform.registry import Asked, prop
from proofs_checks.conform.search import Skip, Violation
from proofs_checks.conform.subject import ForeignError, Subject

DIMS = (1, 2, 3, 5, 8, 16, 64, 80, 96, 128, 256)
TOKENS = (1, 2, 3, 17, 64, 128)
HEADS = (1, 2, 3)
#: numbers of the layers that searches draw; where none is so small, the dozen smallest
MOST = 2048
#: exceptions in which a codec may say that it does not take an argument
REFUSALS = {"ValueError", "TypeError", "NotImplementedError"}
#: words that say which size or element type is not taken
NAMES_SIZE = re.compile(
    r"dim|channel|size|shape|width|multiple|divis|power|group|token|length|features|even|odd|head", re.I
)
#: words that say what numbers of tokens are taken; "zero-size array" is an accident
NAMES_STEP = re.compile(r"token|group|multiple|sequence", re.I)
NAMES_DTYPE = re.compile(r"dtype|float|half|double|type", re.I)
NAMES_NUMBER = re.compile(r"nan|\binf|finite", re.I)


def refuses(problem: ForeignError, names: re.Pattern[str]) -> bool:
    """Whether this failure is a refusal: one of REFUSALS (or a subclass) whose message says what it is about."""
    return bool(REFUSALS & set(problem.kinds)) and bool(names.search(problem.message))


def _works(subject: Subject, instance: Instance) -> str:
    """ "" if it comes back in its shape and finite, else what happened."""
    keys, values = instance.arrays()
    try:
        back = subject.through(keys, values)
    except ForeignError as problem:
        return ("refused: " if refuses(problem, NAMES_SIZE) else "") + str(problem)
    for name, x, y in (("keys", keys, back.keys), ("values", values, back.values)):
        if x.shape != y.shape:
            return f"{name} of shape {x.shape} came back as {y.shape}"
        if not np.isfinite(y.astype(np.float64)).all():
            return f"finite {name} came back as NaN or inf"
    return ""


def survey(subject: Subject) -> tuple[Sizes, dict[str, str]]:
    """The sizes that a codec codes at all, and what became of the others; RuntimeError if it codes nothing."""
    troubles: dict[str, str] = {}
    base, first = None, ""
    for kind in ("float32", "float16"):
        for count, dim in ((128, 64), (128, 128), (64, 128), (17, 64), (128, 16)):
            one = Instance(2, count, dim, dim, kind, "gaussian")
            trouble = _works(subject, one)
            first = first or (f"{one}: {trouble}" if trouble else "")
            if not trouble:
                base = one
                break
        if base:
            break
    if base is None:
        raise RuntimeError(first)

    def tried(label: str, values: tuple[Any, ...], make: Any) -> tuple[Any, ...]:
        good = []
        for value in values:
            trouble = _works(subject, make(value))
            if trouble:
                troubles[f"{label} {value}"] = trouble
            else:
                good.append(value)
        return tuple(good)

    t, d, dtype = base.tokens, base.dim, base.dtype
    dims = tried("dim", DIMS, lambda n: Instance(1, t, n, n, dtype, "gaussian"))
    tokens = tried("tokens", TOKENS, lambda n: Instance(1, n, d, d, dtype, "gaussian"))
    heads = tried("heads", HEADS, lambda n: Instance(n, t, d, d, dtype, "gaussian"))
    kinds = ("float32", "float16", "float64") + (("bfloat16",) if subject.about.get("bfloat16") else ())
    dtypes = tried("dtype", kinds, lambda n: Instance(1, t, d, d, n, "gaussian"))
    other = next((n for n in dims if n != d), None)
    own = other is not None and not _works(subject, Instance(1, t, d, other, dtype, "gaussian"))
    # sizes that work one by one need not work together: small layers are tried as they are
    heads, tokens, dims, dtypes = heads or (2,), tokens or (t,), dims or (d,), dtypes or (dtype,)
    small = sorted(
        ((h, n, m, v) for h in heads for n in tokens for m in dims for v in {m, dims[0] if own else m}),
        key=lambda s: (s[0] * s[1] * (s[2] + s[3]), s),
    )  # fmt: skip
    small = [s for s in small if s[0] * s[1] * (s[2] + s[3]) <= MOST] or small[:12]
    if subject.fit:  # a fit for each
        small = [s for s in small if s[0] <= 2 and s[2] in dims[:3] and s[3] == s[2]] or small[:12]
    shapes = [
        s
        for s in small
        if f"{s}" not in troubles and not _note(troubles, s, _works(subject, Instance(*s, dtype, "gaussian")))
    ]
    return Sizes(heads, tokens, dims, dtypes, own, tuple(shapes) or ((2, t, d, d),)), troubles


def _note(troubles: dict[str, str], shape: Any, trouble: str) -> str:
    if trouble:
        troubles[f"shape {shape}"] = trouble
    return trouble


def _gaussian(shape: Any, dtype: str) -> Instance:
    heads, tokens, dim, value_dim = shape
    return Instance(heads, tokens, dim, value_dim, dtype, "gaussian")


def _sizes_of(asked: Asked, label: str) -> list[tuple[str, str]]:
    return [(name, said) for name, said in asked.refused.items() if name.startswith(f"{label} ")]


@prop(
    "dimensions",
    "head_dim of 1, 2, 3, 5, ..., 256 is coded, or refused by a ValueError that says which sizes there are",
)
def dimensions(asked: Asked) -> str:
    for name, said in _sizes_of(asked, "dim"):
        if not said.startswith("refused: "):
            d = int(name.split()[1])
            raise Violation(said, Instance(1, max(asked.sizes.tokens), d, d, asked.sizes.dtypes[0], "gaussian"))
    refused = [name.split()[1] for name, _ in _sizes_of(asked, "dim")]
    return f"{', '.join(map(str, asked.sizes.dims))} coded" + (
        f"; {', '.join(refused)} refused by name" if refused else ""
    )


@prop("tokens", "any number of tokens and heads is coded, or refused by a ValueError that says which there are")
def tokens(asked: Asked) -> str:
    for label in ("tokens", "heads"):
        for name, said in _sizes_of(asked, label):
            if not said.startswith("refused: ") and name != "tokens 1":
                n, d = int(name.split()[1]), asked.sizes.usual
                h, t = (1, n) if label == "tokens" else (n, asked.sizes.tokens[-1])
                raise Violation(said, Instance(h, t, d, d, asked.sizes.dtypes[0], "gaussian"))
    for name, said in asked.refused.items():
        if name.startswith("shape ") and not said.startswith("refused: "):
            raise Violation(said, _gaussian(ast.literal_eval(name[6:]), asked.sizes.dtypes[0]))
    return f"{', '.join(map(str, asked.sizes.tokens))} tokens, {', '.join(map(str, asked.sizes.heads))} heads"


@prop("empty", "a layer of no token (T = 0) is coded and comes back as one")
def empty(asked: Asked) -> str:
    h, _, d, v = asked.sizes.smallest
    _step(asked, Instance(h, 0, d, v, asked.sizes.dtypes[0]))
    return f"({h}, 0, {d}) came back"


@prop("one-token", "a layer of one token (T = 1), as at each step of decoding, is coded and comes back as one")
def one_token(asked: Asked) -> str:
    h, _, d, v = asked.sizes.smallest
    for one in (
        Instance(h, 1, d, v, asked.sizes.dtypes[0]),
        Instance(h, 1, asked.sizes.usual, asked.sizes.usual, asked.sizes.dtypes[0], "gaussian"),
    ):
        _step(asked, one)
    return f"({h}, 1, {d}) and ({h}, 1, {asked.sizes.usual}) came back"


def _step(asked: Asked, one: Instance) -> None:
    keys, values = one.arrays()
    try:
        asked.subject.through(keys, values)
    except ForeignError as problem:
        if problem.stage == "encode" and refuses(problem, NAMES_STEP):
            raise Skip(f"refused by name: {problem}") from None
    asked.run(keys, values, one)


@prop("dtype", "what is decoded has the element type of what was encoded, or that type is refused by name")
def dtype(asked: Asked) -> str:
    kept = []
    for name in ("float32", "float16", "bfloat16", "float64"):
        if name == "bfloat16" and not asked.subject.about.get("bfloat16"):
            continue
        one = Instance(*asked.sizes.smallest, name)
        keys, values = one.arrays()
        try:
            back = asked.subject.through(keys, values)
        except ForeignError as problem:
            if not refuses(problem, NAMES_DTYPE):
                raise Violation(str(problem), one) from None
            continue
        for side, x, y in (("keys", keys, back.keys), ("values", values, back.values)):
            if x.dtype != y.dtype:
                raise Violation(f"{side} of {x.dtype} came back as {y.dtype}", one)
        kept.append(name)
    if not kept:
        raise Violation("every element type is refused", None)
    return f"{', '.join(kept)} kept"


def _poisoned(asked: Asked, numbers: tuple[float, ...]) -> Any:
    from hypothesis import strategies as st

    def put(one: Instance, side: str, h: int, t: int, c: int, number: float) -> Instance:
        d = one.dim if side == "keys" else one.value_dim
        return one.put(side, h % one.heads, t % one.tokens, c % d, number)

    places = st.integers(0, 7)
    return st.builds(
        put, instances(asked.sizes), st.sampled_from(("keys", "values")), places, places, places, st.sampled_from(numbers)
    )  # fmt: skip


def _refused(asked: Asked, numbers: tuple[float, ...]) -> str:
    words = []

    def check(one: Instance) -> None:
        side, h, t, _, _ = one.puts[0]
        keys, values = one.arrays()
        try:
            back = asked.subject.through(keys, values)
        except ForeignError as problem:
            if problem.stage == "encode" and NAMES_NUMBER.search(problem.message):
                words.append(problem.error)
                return
            raise Violation(f"refused, but not by name: {problem}", one) from None
        finite: Any = np.isfinite(back.keys if side == "keys" else back.values).all(axis=-1)
        other = np.isfinite(back.values if side == "keys" else back.keys).all()
        spoilt = ~finite
        spoilt[h, t] = False
        fate = (
            "spoils other vectors" if spoilt.any() or not other
            else "comes back as NaN or inf in its vector" if not finite[h, t] else "comes back as finite numbers"
        )  # fmt: skip
        raise Violation(f"accepted without a word; it {fate}", one)

    asked.search(_poisoned(asked, numbers), check)
    return f"refused by {', '.join(sorted(set(words)))}"


@prop("nan", "a NaN among keys or values is refused by encode, in an exception that names it")
def nan(asked: Asked) -> str:
    return _refused(asked, (np.nan,))


@prop("inf", "an infinity among keys or values is refused by encode, in an exception that names it")
def inf(asked: Asked) -> str:
    return _refused(asked, (np.inf, -np.inf))


@prop(
    "views",
    "a strided view is coded as well as its contiguous copy: its error is at most 1.1 times that, and 2^-8 of its length, more",
)
def views(asked: Asked) -> str:
    other_bytes: list[Instance] = []

    def check(one: Instance) -> None:
        plain = asked.through(one)
        for layout in ("transposed", "step"):
            other = asked.through(one, layout=layout)
            for name, x in zip(("keys", "values"), one.arrays()):
                x = x.astype(np.float64)  # noqa: PLW2901
                length = np.linalg.norm(x) or 1.0
                before, now = (
                    float(np.linalg.norm(getattr(r, name).astype(np.float64) - x) / length) for r in (plain, other)
                )
                if not now <= 1.1 * before + 2.0**-8:
                    raise Violation(
                        f"{name} of a {layout} view err by {now:.3g} of their length, of its contiguous copy by {before:.3g}",
                        one,
                    )
            if other.digest != plain.digest:
                other_bytes.append(one)  # sums in another order: allowed, and said

    asked.search(instances(asked.sizes, fills=("ramp", "gaussian")), check)
    return f"{'other' if other_bytes else 'the same'} bytes from transposed and strided views"


@prop("input", "encode leaves the arrays that it is given as they are")
def unchanged(asked: Asked) -> str:
    def check(one: Instance) -> None:
        if asked.through(one).changed:
            raise Violation("encode wrote into its input", one)

    asked.search(instances(asked.sizes, fills=("ones", "ramp", "gaussian")), check)
    return "unchanged"


@prop(
    "hostile-bytes",
    "bytes that are no stream of its own are refused by a ValueError, without a crash, a hang or a MemoryError",
)
def hostile_bytes(asked: Asked) -> str:
    from hypothesis import strategies as st

    shape = next((s for s in asked.sizes.shapes if s[1] > 1), asked.sizes.smallest)
    one = Instance(*shape, asked.sizes.dtypes[0], "ramp")
    true = asked.through(one, keep=True)
    if not true.is_bytes:
        raise Skip("encode gives an object, not bytes")
    data = true.raw[0]
    refusals: dict[str, int] = {}
    accepted = 0

    def feed(bad: bytes, how: str) -> None:
        nonlocal accepted
        try:
            asked.subject.decode(bad, one.heads, one.dim, one.value_dim)
        except ForeignError as problem:
            good = "ValueError" in problem.kinds or any(
                w in problem.error for w in ("Corrupt", "Format", "Decod", "Stream")
            )
            if not good or problem.error == "MemoryError":
                raise Violation(f"{how}: {problem}", how) from None
            refusals[problem.error] = refusals.get(problem.error, 0) + 1
            return
        accepted += 1
        if len(bad) < len(data) and data.startswith(bad):
            raise Violation(f"{how}: decoded without a word", how)

    cuts = sorted({0, 1, *range(2, len(data), max(1, len(data) // 12)), len(data) - 1} & set(range(len(data))))
    for cut in cuts:
        feed(data[:cut], f"cut to {cut} of {len(data)} bytes")

    class Change:
        def __init__(self, at: int, byte: int, many: int) -> None:
            self.at, self.byte, self.many = at % max(1, len(data)), byte, many

        def __str__(self) -> str:
            return f"bytes {self.at} to {self.at + self.many} of {len(data)} set to {self.byte:#04x}"

    def check(change: Any) -> None:
        bad = bytearray(data)
        bad[change.at : change.at + change.many] = bytes([change.byte]) * len(bad[change.at : change.at + change.many])
        if bytes(bad) != data:
            try:
                feed(bytes(bad), str(change))
            except Violation as violation:
                violation.instance = change
                raise

    from proofs_checks.conform.search import least

    try:
        least(
            st.builds(Change, st.integers(0, max(0, len(data) - 1)), st.sampled_from((0xFF, 0, 0x80, 0x7F, 1)), st.integers(1, 8)),
            check, order=lambda c: (c.many, c.at), examples=4 * asked.examples, seconds=asked.seconds,
        )  # fmt: skip
    except Violation as violation:
        violation.instance = str(violation.instance)
        raise
    return f"{sum(refusals.values())} altered streams refused ({', '.join(sorted(refusals))}), {accepted} decoded to something"
