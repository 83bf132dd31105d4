"""What a last stage should be fitted to: whole calibration layers, or what the stages before it leave of them.

    python benchmarks/composition.py CALIBRATION CACHE LAYER...          captured caches of one model, two works (kvtheory capture)

Prints for each layer, reducer and MetricKLT(joint): held bits per original number and attention error of `reducer > MetricKLT`, fitted both
ways, and the reducer alone. The study of compositions itself is `kvtheory compare --choose` (docs/composition.md).
"""

from __future__ import annotations

import sys

import reference
from kvtheory.distortion import attention_error
from kvtheory.layer import Cache, Layer
from reference.compare import Split, as_seen, divide

REDUCERS: tuple[reference.Codec, ...] = (
    reference.SnapKV(keep=0.5),
    reference.MergeReduce(keep=0.5, reducer="refit-values"),
)
RATES = (2.0, 4.0)


def measured(codec: reference.Codec, coded: Layer, judged: Layer) -> tuple[float, float]:
    """(held bits per original number, attention error of held-out queries)."""
    data = codec.encode(coded)
    return reference.held_bits(data, coded), attention_error(judged, reference.decode(data, codec.state))


def main(calibration: str, cache: str, *layers: str) -> None:
    """Print the table."""
    fitted_to, tested = Cache.load(calibration), Cache.load(cache)
    print("layer  reducer                                          joint  fitted to  nominal   held    error")
    for number in map(int, layers):
        coded, judged = divide(tested[number], Split())
        for reducer in REDUCERS:
            alone = measured(reducer, coded, judged)
            print(f"{number:5}  {reducer.codec_id:48} -      -          -       {alone[0]:6.3f}  {alone[1]:.5f}")
            for joint in ("layer", "head"):
                for how in ("whole", "seen"):
                    layer = as_seen([reducer], fitted_to[number]) if how == "seen" else fitted_to[number]
                    for last in reference.MetricKLT.fit_rates([layer], RATES, joint=joint):
                        held, error = measured(reference.Pipeline((reducer, last)), coded, judged)
                        print(
                            f"{number:5}  {reducer.codec_id:48} {joint:6} {how:10} {last.bits:g}       {held:6.3f}  {error:.5f}"
                        )


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
