"""From replaying the tokens to storing the cache: bits against operations of decoding, a checkpoint every B positions."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "replay-frontier"
CAPTION = (
    "Token replay with a checkpoint every B positions (4-bit TurboQuant), on trained models: bits a number against operations of decoding a token (left), and against the error of the attention output "
    "(right), which replay alone does not have up to rounding: its floats are those of another plan than the cache was computed under. "
    "A stored position saves its pass through the model and costs a quantised position; and later tokens read it, so that they err as well. Squares: TurboQuant, 2 to 5 bits. "
    "Bits and operations are both linear in 1/B: the frontier is a straight line between its ends (curved by the logarithms), and its middle is no better than either part of the time."
)


def _models(results: dict[str, Any]) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = results["sequential/checkpoints"]["models"]
    return models


def draw(results: dict[str, Any], style: str) -> Any:
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.8, sharey=True)
    for i, model in enumerate(_models(results)):
        numbers, colour = model["numbers"], styles.COLOURS[i]
        name = model["model"].split(",")[0].removesuffix("-Instruct")
        for axes, what, per in ((left, "operations", model["tokens"]), (right, "error", 1)):
            for rows, marker, line, label in (
                (model["replay"], "o", "-", f"{name}, replay"),
                (model["turboquant"], "s", ":", f"{name}, TurboQuant"),
            ):
                points = [(max(r[what] / per, 1e-12), r["stream_bits"] / numbers) for r in rows]
                axes.plot(
                    *zip(*points), marker + line, color=colour, label=label, mfc=colour if marker == "o" else "white"
                )
            if i == 0:
                for r in model["replay"]:
                    every = r["checkpoint_every"]
                    # clear of the axis, of the line, and of TurboQuant's squares
                    beside = every == 1 or (every is None and axes is right)
                    lift = {1: 0.35, 2: -1.1}.get(every, -0.3) if axes is left else -0.3
                    axes.annotate(
                        "replay alone" if every is None else f"B = {every}", (max(r[what] / per, 1e-12), r["stream_bits"] / numbers), xytext=(0.7 if beside else -0.7, lift),
                        textcoords="offset fontsize", ha="left" if beside else "right", size="small", color=colour,
                    )  # fmt: skip
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
    left.set(xlabel="operations of decoding a token", ylabel="bits a number, all counted")
    right.set_xlabel("relative squared error of the attention output")
    left.legend(loc="lower left")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows: list[list[Any]] = []
    for model in _models(results):
        for kind in ("replay", "turboquant"):
            rows += [
                [
                    model["model"], kind, r.get("checkpoint_every", ""), r.get("bits", ""), r["stream_bits"] / model["numbers"], r["operations"] / model["tokens"], r["seconds"],
                    r["error"],
                ]
                for r in model[kind]
            ]  # fmt: skip
    return [
        "model",
        "codec",
        "checkpoint every",
        "nominal bits",
        "bits a number",
        "operations a token",
        "seconds",
        "error",
    ], rows
