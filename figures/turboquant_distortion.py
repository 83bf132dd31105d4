"""TurboQuant's distortion against its bounds: D 4^b, so that the bounds are level lines and rounding shows."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "turboquant-distortion"
CAPTION = (
    "Mean squared error of TurboQuant per unit vector, times 4^b (exact integration of the Lloyd-Max quantiser on the law of one "
    "coordinate of a random direction in dimension d). It rises towards the Panter-Dite constant of that dimension and stays below "
    "the paper's upper bound sqrt(3) pi / 2. The paper's lower line 4^-b is no bound: TurboQuant itself is below it in the plane, random "
    "codes at (d, b) = (8, 3), (64, 4) and (128, 5). Crosses: the figures that the paper prints with 'approximately'; they are right to "
    "their digits at large d, and read as upper bounds, which is our reading, they fail (at d = 128 for 1, 3 and 4 bits)."
)


def _data(results: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = results["quantizers/turboquant-mse-bound"]
    return data


def draw(results: dict[str, Any], style: str) -> Any:
    data = _data(results)
    bits = data["bits"]
    figure, axes = styles.subplots(style, wide=True, ratio=0.5)
    shown = [d for d in ("2", "8", "64", "128", "256") if d in data["distortion"]]
    for i, d in enumerate(shown):
        scaled = [value * 4.0**b for b, value in zip(bits, data["distortion"][d])]
        axes.plot(bits, scaled, color=styles.COLOURS[i], marker=styles.MARKERS[i], ls=styles.LINES[i], label=f"d = {d}")
    gaussian = [value * 4.0**b for b, value in zip(bits, data["gaussian"])]
    axes.plot(bits, gaussian, color="black", lw=0.8, label="d to infinity (Gaussian)")
    upper = data["upper_bound"][0]
    axes.axhline(upper, color="#5b6678", lw=1, ls="--")
    axes.annotate(
        f"upper bound sqrt(3) pi/2 = {upper:.4f}",
        (0.1, upper),
        xytext=(0, 3),
        textcoords="offset points",
        color="#5b6678",
    )
    axes.axhline(1.0, color="#5b6678", lw=1, ls=":")
    axes.annotate(
        "the paper's lower bound 4^-b",
        (bits[-1], 1.0),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        color="#5b6678",
    )
    printed = [(int(b), v * 4.0 ** int(b)) for b, v in data["printed"].items()]
    axes.plot(*zip(*printed), "x", color="#b3261e", ms=7, mew=1.6, label="printed in the paper")
    axes.set(xlabel="bits b per number", ylabel="distortion x 4^b", ylim=(0, 3.05))
    axes.legend(ncols=3, loc="lower right")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    data = _data(results)
    dims = list(data["distortion"])
    header = ["bits", *(f"d={d}" for d in dims), "gaussian", "upper_bound", "paper_lower_bound", "printed"]
    return header, [
        [b, *(data["distortion"][d][i] for d in dims), data["gaussian"][i], data["upper_bound"][i], data["paper_lower_bound"][i],
         data["printed"].get(str(b), "")]
        for i, b in enumerate(data["bits"])
    ]  # fmt: skip
