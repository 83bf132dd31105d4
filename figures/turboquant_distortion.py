"""TurboQuant's distortion against its bounds: D 4^b, so that the bounds are level lines and rounding shows."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "turboquant-distortion"
CAPTION = (
    "Left: mean squared error of TurboQuant per unit vector, times 4ᵇ (exact integration of the Lloyd-Max quantiser on the law of one "
    "coordinate of a random direction in dimension d). It rises towards the Panter-Dite constant of that dimension, in the plane it "
    "falls towards it, and stays below the paper's upper bound √3·π/2. Dotted, in the colour of its d: a proved lower bound of every "
    "code of that dimension and rate. The paper's lower line 4⁻ᵇ is no bound: TurboQuant itself is below it in the plane. Right: the "
    "same over the limit of large d, the normal law, where the high dimensions stand apart. Crosses: the figures that the paper "
    "prints with 'approximately'; they are right to their digits at large d, and read as upper bounds, which is our reading, they fail "
    "(at d = 128 for 1, 3 and 4 bits)."
)
#: dimension -> look; the largest are told apart in the right panel
_LEFT, _RIGHT = ("2", "8", "64", "128"), ("64", "128", "256")
_LOOKS = {d: {**styles.look(i), "ls": styles.LINES[i % 2]} for i, d in enumerate(("2", "8", "64", "128", "256"))}
_PRINTED: dict[str, Any] = {"marker": "x", "ls": "none", "color": "black", "mew": 1.6, "zorder": 4}


def _data(results: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = results["quantizers/turboquant-mse-bound"]
    return data


def draw(results: dict[str, Any], style: str) -> Any:
    data = _data(results)
    bits, gaussian = data["bits"], data["gaussian"]
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.86, width_ratios=[1.5, 1])
    ends = []
    for d in _LEFT:
        if d in data["distortion"]:
            scaled = [value * 4.0**b for b, value in zip(bits, data["distortion"][d])]
            left.plot(bits, scaled, **_LOOKS[d])
            ends.append((scaled[-1], f"d = {d}", _LOOKS[d]["color"]))
        if d in data.get("code_bound", {}):
            floor = [value * 4.0**b for b, value in zip(bits, data["code_bound"][d])]
            left.plot(bits, floor, color=_LOOKS[d]["color"], ls=":", marker=_LOOKS[d]["marker"], ms=2)
    limit = [value * 4.0**b for b, value in zip(bits, gaussian)]
    left.plot(bits, limit, color="black", lw=0.8)
    ends.append((limit[-1], r"$d \to \infty$", "black"))
    upper = data["upper_bound"][0]
    for height, text, x, ha in (
        (upper, rf"upper bound $\sqrt{{3}}\,\pi/2 = {upper:.4f}$", 0.02, "left"),
        (1.0, r"the paper's lower bound $4^{-b}$", 0.99, "right"),
    ):
        left.axhline(height, color=styles.GUIDE, lw=1, ls="--", zorder=1)
        left.annotate(
            text, (x, height), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points", color=styles.GUIDE, ha=ha
        )  # fmt: skip
    left.plot([], [], color=styles.GUIDE, ls=":", label="lower bound of any code")
    printed = [(int(b), v) for b, v in data["printed"].items()]
    left.plot([b for b, _ in printed], [v * 4.0**b for b, v in printed], label="printed in the paper", **_PRINTED)
    left.set(
        xlabel="bits b per number", ylabel=r"distortion $\times\; 4^b$", ylim=(0, 3.05), xlim=(-0.2, bits[-1] + 0.15)
    )
    left.legend(loc="lower right", bbox_to_anchor=(1.0, 0.39))
    styles.labels_at_right(left, ends)

    shown = bits[1:]
    ends = []
    for d in _RIGHT:
        if d in data["distortion"]:
            over = [data["distortion"][d][b] / gaussian[b] for b in shown]
            right.plot(shown, over, **_LOOKS[d])
            ends.append((over[-1], f"d = {d}", _LOOKS[d]["color"]))
    right.axhline(1.0, color="black", lw=0.8)
    ends.append((1.0, r"$d \to \infty$", "black"))
    right.plot([b for b, _ in printed], [v / gaussian[b] for b, v in printed], **_PRINTED)
    right.set(xlabel="bits b per number", ylabel=r"distortion / its limit for $d \to \infty$", xticks=shown)
    styles.labels_at_right(right, ends)
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    data = _data(results)
    dims, codes = list(data["distortion"]), list(data.get("code_bound", {}))
    header = [
        "bits", *(f"d={d}" for d in dims), "gaussian", "upper_bound", "paper_lower_bound", *(f"lower_bound_any_code_d={d}" for d in codes),
        "printed",
    ]  # fmt: skip
    return header, [
        [b, *(data["distortion"][d][i] for d in dims), data["gaussian"][i], data["upper_bound"][i], data["paper_lower_bound"][i],
         *(data["code_bound"][d][i] for d in codes), data["printed"].get(str(b), "")]
        for i, b in enumerate(data["bits"])
    ]  # fmt: skip
