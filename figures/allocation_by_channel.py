"""Water-filling made visible: variances of the coefficients, the level, and the bits that lift each down to it."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "allocation-by-channel"
CAPTION = (
    "Reverse water-filling on the coefficients of the metric KLT of one KV head, keys and values, at 2 bits a coefficient on average. Above: "
    "variance of each coefficient in the units of its price, and the level θ that every coefficient with bits is left with; coefficients "
    "below it get none and are left as they are (light). Below: the bits, ½ log₂ of the variance over θ, and the whole bits that are best "
    "with Lloyd-Max quantisers of a normal law."
)


def draw(results: dict[str, Any], style: str) -> Any:
    import matplotlib

    data = results["transform-coding/water-filling"]
    width = matplotlib.rcParams["lines.linewidth"]
    parts = data["parts"]
    figure, panels = styles.subplots(
        style, wide=True, columns=len(parts), rows=2, ratio=0.5 if len(parts) > 1 else 0.24, sharex="col", squeeze=False
    )
    for column, part in enumerate(parts):
        top, bottom = panels[0][column], panels[1][column]
        variance, theta = part["variance"], part["level"]
        place = list(range(1, len(variance) + 1))
        floor = min(x for x in variance if x > 0) / 2
        left = [min(x, theta) for x in variance]
        top.bar(place, [x - floor for x in left], bottom=floor, width=1.0, color="#d5dae1", label="what is left")
        spent = [(p, x) for p, x in zip(place, variance) if x > theta]
        top.bar(
            [p for p, _ in spent],
            [x - theta for _, x in spent],
            bottom=theta,
            width=1.0,
            color=styles.COLOURS[0],
            label="removed by bits",
        )
        top.axhline(theta, color=styles.COLOURS[5], lw=0.8 * width, label="level θ")
        top.set(yscale="log", ylim=(floor, 2 * variance[0]), title=part["label"])
        bottom.plot(
            place,
            part["bits"],
            color=styles.COLOURS[0],
            label=f"real bits, mean {sum(part['bits']) / len(place):g}",
        )
        bottom.step(
            place, part["integer_bits"], where="mid", color=styles.COLOURS[1], lw=0.9 * width, label="whole bits"
        )
        bottom.set(xlabel="coefficient, by variance", ylim=(0, None), xlim=(0.5, len(place) + 0.5))
        if column == 0:
            top.set_ylabel("variance × price")
            bottom.set_ylabel("bits")
            top.legend(loc="upper right")
            bottom.legend(loc="upper right")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [part["label"], c + 1, *entry, part["level"]]
        for data in results.values()
        for part in data["parts"]
        for c, entry in enumerate(zip(part["variance"], part["bits"], part["integer_bits"]))
    ]
    return ["part", "coefficient", "variance", "bits", "whole bits", "level"], rows
