"""PALU (arXiv 2407.21118, ICLR 2025): low rank. Keys before RoPE and values of a group of heads as few latents, quantised alike.

For each group of `head_group` KV heads of a layer (G-LRD), keys and values apart; x are the group's heads side by side:

    basis      E x x^T = U diag(sigma^2) U^T, uncentred;   z_c = u_c^T x / sigma_c^{1/2}       (kvtheory.transform.whitened_svd: no weights needed)
    ranks      the round(ratio numbers) components of most f_c sigma_c^2 among all groups of all layers, keys and values
                   search="fisher"     f_c = sum_i F_i U_ic^2, F the extras "key_fisher_pre_rope" ("key_fisher") and "value_fisher"
                   search="energy"     f_c = 1 / sum_c sigma_c^2 of the group, so that each group counts alike
                   search="uniform"    the first round(ratio numbers) of each group
    rotation   h = H z: a Hadamard matrix where the rank is a power of two, else (cos + sin)(2 pi j k / r) / sqrt(r), orthogonal, of entries at
               most sqrt(2/r) as well. Folded into the basis: x = U sigma^{1/2} H^T h
    latents    uniform, b bits, for each token and group.  scale="minmax": b-bit code - z, times g.  "max": (2 code + 1) / 2^b - 1, times max |h|

Against the paper: Fisher information of activations instead of weights, and ranks component by component, where the authors give each matrix a
rank in proportion to its Fisher information, in multiples of a block; Hadamard matrices only where they fit any rank. The authors fold the
values' side into W_O; here values are decoded. sinks and window are 0, as there: set them to compare at equal exact tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Layer
from reference import arguments
from reference import calibration as calibrations
from reference.codec import Layers
from reference.stream import Reader
from reference.transform_coding import fixed, stacked
from reference.transform_coding.basis import Basis, principal
from reference.transform_coding.codec import LayerCoder, LayerKind, StackedCoder, TransformCodec
from reference.transform_coding.fixed import FixedCoder, FixedUnit

__all__ = ["PALU"]

Float64 = NDArray[np.float64]

SEARCHES = ("fisher", "energy", "uniform")
SCALES = ("minmax", "max")


@dataclass(frozen=True)
class PALU(TransformCodec):
    """Made by `PALU.fit`; a bare one encodes nothing.

    bits: of a latent, 1 to 8 (the paper: 3, 4; 16 with scale="max" is low rank almost alone). ratio: latents kept of all numbers, 0 < ratio <= 1.
    search: of ranks, above; None: "fisher" if every layer has the extras, else "energy", and `fit` says which in the codec it returns.
    hadamard: whether latents are rotated. scale, head_group, sinks, window: above. layers: what `fit` found, the codec's state.

    Held: ratio x bits; for each token and group 24 ("minmax") or 16 ("max") for keys and as much for values (head_dim 64, 3 heads: .125 or
    .083 a number); 16 for each number of an exact token; a header. Every token takes the same.
    Pitfalls: what the truncation drops is lost at any number of bits.
    """

    bits: int = 3
    ratio: float = 0.7
    search: Literal["fisher", "energy", "uniform"] | None = None
    hadamard: bool = True
    scale: Literal["minmax", "max"] = "minmax"
    head_group: int = 4
    sinks: int = 0
    window: int = 0
    layers: tuple[LayerCoder, ...] = field(default=(), repr=False, compare=False, metadata={"state": True})

    coder_parts = ("side", "codes")
    part_names = ("shape", "exact keys", "exact values", *coder_parts)

    def __post_init__(self) -> None:
        arguments.whole("bits", self.bits, 1, fixed.MOST_OFFSET_BITS if self.scale == "minmax" else fixed.MOST_BITS)
        object.__setattr__(self, "ratio", arguments.number("ratio", self.ratio, 0, 1))
        if self.search is not None:
            arguments.word("search", self.search, SEARCHES)
        if not isinstance(self.hadamard, (bool, np.bool_)):
            raise TypeError(f"hadamard: expected a bool, got {type(self.hadamard).__name__}")
        arguments.word("scale", self.scale, SCALES)
        for name, least in (("head_group", 1), ("sinks", 0), ("window", 0)):
            arguments.whole(name, getattr(self, name), least, 1 << 20)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PALU) and self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)

    @classmethod
    def fit(cls, calibration: Layers, bits: int = 3, ratio: float = 0.7, **options: Any) -> PALU:
        """Fitted to a Cache or a list of Layers; several layers of one index (texts) are pooled. One layer in memory at a time.

        ValueError if a layer has no token behind the sinks, or lacks the extras that search="fisher" needs. options: the other fields.
        """
        return cls.fit_rates(calibration, [bits], ratio=ratio, **options)[0]

    @classmethod
    def fit_rates(cls, calibration: Layers, bits: Sequence[int], **options: Any) -> list[PALU]:
        """`fit` at several rates, which share bases and ranks."""
        bare = [cls(b, **options) for b in bits]
        if not bare:
            return []
        fits = [(LayerKind.of(own[0]), bare[0]._fit(own)) for _, own in calibrations.by_index(calibration)]
        groups = [group for _, own in fits for group in own]
        search = bare[0].search or ("fisher" if all(group.fisher is not None for group in groups) else "energy")
        bare[0]._rank(groups, search)
        chosen: dict[str, Any] = {**options, "search": search}
        return [
            cls(codec.bits, **chosen, layers=tuple(kind.with_coder(codec._coder(own)) for kind, own in fits))
            for codec in bare
        ]

    def read_coder(self, reader: Reader, width: int) -> StackedCoder:
        return FixedCoder.read(reader, width)

    # -- fitting -------------------------------------------------------------------------------------------------------

    def _fit(self, layers: list[Layer]) -> list[_Group]:
        one, out = layers[0], []
        x = stacked.calibration(layers, self.sinks)
        fisher = {
            "keys": calibrations.key_fisher(layers, one.rope),
            "values": calibrations.mean_extra(layers, "value_fisher"),
        }
        for side in ("keys", "values"):
            for heads in stacked.head_groups(one.kv_heads, self.head_group):
                places = stacked.columns(one, side, heads)
                u, variances = principal(x[:, places].T @ x[:, places] / len(x))
                weights, diagonal = None, fisher[side]
                if diagonal is not None:
                    weights = diagonal[heads.start : heads.stop].ravel() @ u**2
                out.append(_Group(places, u, variances, weights))
        return out

    def _rank(self, groups: list[_Group], search: str) -> None:
        """Which components of each group are kept."""
        if search == "uniform":
            for group in groups:
                group.kept = np.arange(round(self.ratio * len(group.variances)))
            return
        scores = []
        for group in groups:
            if search == "fisher" and group.fisher is None:
                raise ValueError(
                    'search: "fisher" needs the extras key_fisher_pre_rope or key_fisher, and value_fisher, of all layers'
                )
            total = float(group.variances.sum())
            weight: Any = group.fisher if search == "fisher" else 1.0 / total if total > 0 else 1.0
            scores.append(weight * group.variances)
        every = np.concatenate(scores)
        # components of no energy last; the stable order gives the first of equal ones
        taken = np.zeros(len(every), bool)
        taken[np.argsort(-every, kind="stable")[: round(self.ratio * len(every))]] = True
        for group, own in zip(groups, np.split(taken, np.cumsum([len(score) for score in scores])[:-1])):
            group.kept = np.flatnonzero(own)

    def _coder(self, groups: list[_Group]) -> FixedCoder:
        levels: fixed.Levels = "offset" if self.scale == "minmax" else "midrise"
        units = []
        for group in groups:
            sigma = np.sqrt(group.variances[group.kept])
            r = np.sqrt(np.where(sigma > 0, sigma, 1.0))
            synthesis = group.u[:, group.kept] * r
            if self.hadamard:
                synthesis = synthesis @ rotation(len(group.kept)).T
            basis = Basis.of(group.places, synthesis / fixed.unit_of(levels), np.zeros(len(group.places)))
            units.append(FixedUnit(basis, np.full(len(group.kept), self.bits, np.uint8)))
        return FixedCoder(tuple(units), "range" if self.scale == "minmax" else "max", levels=levels)


class _Group:
    """Basis u (rows, c), variances (c,) and Fisher weights (c,) of one group; `kept`: components that are coded."""

    def __init__(self, places: NDArray[np.int64], u: Float64, variances: Float64, fisher: Float64 | None) -> None:
        self.places, self.u, self.variances, self.fisher = places, u, variances, fisher
        self.kept: NDArray[np.int64] = np.zeros(0, np.int64)


def rotation(r: int) -> Float64:
    """An orthogonal (r, r) matrix of entries of at most sqrt(2/r): Hadamard's for powers of two, else Hartley's."""
    j = np.arange(r)
    if r & (r - 1) == 0:
        signs = np.array([int(i).bit_count() & 1 for i in np.bitwise_and.outer(j, j).ravel()]).reshape(r, r)
        return (1.0 - 2.0 * signs) / np.sqrt(max(1, r))
    angle = 2 * np.pi / r * (np.outer(j, j) % r)
    return np.asarray((np.cos(angle) + np.sin(angle)) / np.sqrt(r))
