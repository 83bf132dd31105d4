"""Codecs compared on captured caches, in one unit: attention error at the rate that their real bytes hold.

For one layer:

    coded      the tokens at positions < prefix, as float16 (or another element type): encode -> bytes -> decode
    held out   the true queries at positions prefix .. prefix + held - 1, which no codec sees
    error      sum ||o_hat - o||^2 / sum ||o||^2, o = sum_h a_h V W_O^h over the captured prefix, o_hat over the decoded one

The held-out queries are taken as *future queries*: each sees exactly the compressed prefix, all of it (query_positions None), and none
of the tokens between the prefix and itself, which a real decoder would hold besides. So the error is that of the compressed part alone,
the same for the first held-out query and the last; what the model's own output loses is smaller, as fresh tokens share the weight.
A layer with a sliding window is measured alike; its column `window` says that true queries would see less.

Numerator and denominator are kept for each segment of consecutive held-out queries, of the whole layer and of each KV head group (its
query heads only, all others exact). Intervals resample segments, the same ones for all codecs: `summarise`. They speak of queries
on this text; other texts are other sweeps.

    sources = [compare.source("sample")]
    codecs = compare.codecs_at(["Full", "TurboQuant"], bits=[2, 3, 4])
    tasks = compare.plan(sources, codecs)
    with kvtheory.sweep.executor(2) as pool:
        rows, timings = kvtheory.sweep.run(tasks, pool, "report/compare", same={})
    compare.write("report/compare", rows, timings)             # Parquet; docs/compare.md has the columns
    (summary,) = compare.summarise(rows)

    its = compare.calibration("emma.safetensors")              # another work, the same model
    codecs = compare.fit("AATC,MetricKLT", [2, 3], its, "report/compare/states")
    compare.at_equal_rate(summary, [2, 2.5], baseline="AATC")
    compare.choose(on_another_text, summary, [1, 1.5, 2, 3])   # reference.compare.frontier
"""

from reference.compare.equal_rate import (
    EQUAL_KEPT_COLUMNS,
    EQUAL_RATE_COLUMNS,
    Curve,
    EqualRate,
    write_equal_kept,
    write_equal_rates,
)
from reference.compare.fitted import Calibration, FittedCodec, calibration, fit, refuse_same_work, usable
from reference.compare.frontier import Choice, Gain, Parts, choose, gains, parts, write_composition
from reference.compare.ranking import RANKING_COLUMNS, Ranked, rank, write_ranking
from reference.compare.seen import as_seen
from reference.compare.sources import DTYPES, Source, Split, divide, source
from reference.compare.specs import EVERY, Spec, specs
from reference.compare.summary import (
    Point,
    Summary,
    at_equal_kept,
    at_equal_rate,
    at_held_bits,
    error_curves,
    picture,
    summarise,
)
from reference.compare.tables import COLUMNS, TIMING_COLUMNS, host, write
from reference.compare.tasks import codecs_at, measure, plan

__all__ = [
    "COLUMNS",
    "DTYPES",
    "EQUAL_KEPT_COLUMNS",
    "EQUAL_RATE_COLUMNS",
    "EVERY",
    "RANKING_COLUMNS",
    "TIMING_COLUMNS",
    "Calibration",
    "Choice",
    "Curve",
    "EqualRate",
    "FittedCodec",
    "Gain",
    "Parts",
    "Point",
    "Ranked",
    "Source",
    "Spec",
    "Split",
    "Summary",
    "as_seen",
    "at_equal_kept",
    "at_equal_rate",
    "at_held_bits",
    "calibration",
    "choose",
    "codecs_at",
    "divide",
    "error_curves",
    "fit",
    "gains",
    "host",
    "measure",
    "parts",
    "picture",
    "plan",
    "rank",
    "refuse_same_work",
    "source",
    "specs",
    "summarise",
    "usable",
    "write",
    "write_composition",
    "write_equal_kept",
    "write_equal_rates",
    "write_ranking",
]
