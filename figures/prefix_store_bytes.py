"""What a store of sessions that begin alike holds, policy by policy."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "prefix-store-bytes"
CAPTION = (
    "Bytes of a store of sessions that begin alike, over those of each session in a stream of its own: keys and values (dark), tables and tokens (light). The radix tree holds every distinct prefix once, "
    "which no exact store can go below; blocks lose what does not fill one; groups {d_T ≤ δ} bring together what shares least, and groups {d_T ≥ δ} at best what a tree finds by itself. "
    "Small heads of few channels: tables weigh more than on real models."
)


def _policies(results: dict[str, Any]) -> list[dict[str, Any]]:
    policies: list[dict[str, Any]] = results["sharing/groups-by-large-similarity"]["policies"]
    return policies


def draw(results: dict[str, Any], style: str) -> Any:
    policies = _policies(results)
    figure, axes = styles.subplots(style, wide=True, ratio=0.05 * len(policies) + 0.06)
    for y, policy in enumerate(policies):
        whole = policy["bytes_unshared"]
        content = policy["bytes_stored"] - policy["table_bytes"]
        axes.barh(y, content / whole, 0.7, color=styles.COLOURS[0])
        axes.barh(y, policy["table_bytes"] / whole, 0.7, left=content / whole, color=styles.COLOURS[4])
        text = f"{policy['bytes_stored'] / whole:.2f}   {policy['found'] / policy['tokens']:.0%} of tokens found stored"
        axes.annotate(
            text, (policy["bytes_stored"] / whole, y), xytext=(0.5, 0), textcoords="offset fontsize", va="center", size="small", zorder=3,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )  # fmt: skip
    axes.axvline(1.0, color=styles.GUIDE, ls="--", lw=0.8)
    axes.set_yticks(range(len(policies)), [p["policy"] for p in policies])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.5)
    axes.set_xlabel("bytes over those of all sessions apart")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    keys = ("policy", "bytes_stored", "table_bytes", "bytes_unshared", "stored_tokens", "found", "tokens")
    return list(keys), [[p[k] for k in keys] for p in _policies(results)]
