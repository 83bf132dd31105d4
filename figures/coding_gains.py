"""What each basis costs beyond the best transform, on every KV head that was measured."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "coding-gains"
CAPTION = (
    "Bits a number that a basis needs beyond the metric KLT for the same weighted error, at high rate (Hadamard's inequality; each 6 dB of "
    "error is a bit). Left: keys before RoPE, under the metric of the queries that read them; right: values, under W_O and the attention's "
    "mean square. Small marks: KV heads; large marks: their mean. All rows but 'PCA, bits by variance' "
    "have the best bits for their weights; the transform of AATC is PCA with bits by weight. Metrics shrunk by 1 %; a high-rate figure, of which 2 bits realise a part."
)
_ORDER = ("eigenvectors of M, bits by weight", "PCA, bits by weight", "PCA, bits by variance", "identity, bits by weight", "Hadamard, bits by weight")  # fmt: skip


def _name(basis: str) -> str:
    return {"eigenvectors of M, bits by weight": "eigenvectors of M", "PCA, bits by weight": "PCA, bits by weight (AATC)"}.get(
        basis, basis.replace(", bits by weight", "")
    )  # fmt: skip


def draw(results: dict[str, Any], style: str) -> Any:
    import matplotlib

    size = matplotlib.rcParams["lines.markersize"]
    parts = results["transform-coding/pca-weights-loss"]["parts"]
    figure, panels = styles.subplots(style, wide=True, columns=2, ratio=0.5, sharey=True)
    layers = list(dict.fromkeys(p["label"].split(" KV head")[0] for p in parts))
    for axes, kind in zip(panels, ("keys", "values")):
        own = [p for p in parts if p["kind"] == kind]
        for row, basis in enumerate(_ORDER):
            losses = [p["loss_bits"][basis] for p in own]
            for i, (p, loss) in enumerate(zip(own, losses)):
                look = styles.look(layers.index(p["label"].split(" KV head")[0]))
                # a little above and below the line, so that equal heads stay apart
                axes.plot(loss, row + 0.18 * ((i % 5) - 2) / 2, ls="none", ms=0.8 * size, alpha=0.85, mew=0, **look)
            if losses:
                axes.plot(sum(losses) / len(losses), row, marker="|", ms=4.5 * size, color="black", mew=1.2)
        axes.set(
            yticks=range(len(_ORDER)),
            yticklabels=[_name(b) for b in _ORDER],
            xlabel="bits a number beyond the metric KLT",
        )
        axes.set(title="keys" if kind == "keys" else "values", xlim=(0, None))
    handles = [
        matplotlib.lines.Line2D([], [], ls="none", **styles.look(i), label=layer) for i, layer in enumerate(layers[:8])
    ]
    panels[0].invert_yaxis()  # shared
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [part["label"], part["kind"], basis, loss]
        for data in results.values()
        for part in data["parts"]
        for basis, loss in part["loss_bits"].items()
    ]
    return ["part", "kind", "basis", "bits beyond the metric KLT"], rows
