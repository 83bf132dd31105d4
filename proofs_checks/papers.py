"""The papers whose claims the ledger checks."""

from typing import NamedTuple

#: key of the statements that no paper makes
OWN = "kvtheory"


class Paper(NamedTuple):
    title: str
    authors: str
    date: str
    url: str


PAPERS = {
    "2608.14191": Paper(
        "KV Cache Compression Through the Lens of Transform Coding",
        "H. Laus, C. Mayrink Verdun, H. Wang, F. du Pin Calmon, F. Krahmer",
        "2026-08-14",
        "https://arxiv.org/abs/2608.14191",
    ),
    "2604.15356": Paper(
        "Sequential KV Cache Compression via Probabilistic Language Tries: Beyond the Per-Vector Shannon Limit",
        "G. Magarshak",
        "2026-04-10",
        "https://arxiv.org/abs/2604.15356",
    ),
    "2604.06228": Paper(
        "Probabilistic Language Tries: A Unified Framework for Compression, Decision Policies, and Execution Reuse",
        "G. Magarshak",
        "2026-03-29",
        "https://arxiv.org/abs/2604.06228",
    ),
    "2607.01520": Paper(
        "The risk of KV cache compression",
        "L. Haverbeck, C. Amo Alonso, A. F. Posada-Moreno, S. Trimpe, M. Pavone",
        "2026-07-01",
        "https://arxiv.org/abs/2607.01520",
    ),
    "2504.19874": Paper(
        "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
        "A. Zandieh, M. Daliri, M. Hadian, V. Mirrokni",
        "2025-04-28",
        "https://arxiv.org/abs/2504.19874",
    ),
    "2406.03482": Paper(
        "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead",
        "A. Zandieh, M. Daliri, I. Han",
        "2024-06-05",
        "https://arxiv.org/abs/2406.03482",
    ),
    "2502.02617": Paper(
        "PolarQuant: Quantizing KV Caches with Polar Transformation",
        "I. Han, P. Kacham, A. Karbasi, V. Mirrokni, A. Zandieh",
        "2025-02-04",
        "https://arxiv.org/abs/2502.02617",
    ),
    "2402.02750": Paper(
        "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
        "Z. Liu, J. Yuan, H. Jin, S. Zhong, Z. Xu, V. Braverman, B. Chen, X. Hu",
        "2024-02-05",
        "https://arxiv.org/abs/2402.02750",
    ),
    "2401.18079": Paper(
        "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization",
        "C. Hooper, S. Kim, H. Mohammadzadeh, M. W. Mahoney, Y. S. Shao, K. Keutzer, A. Gholami",
        "2024-01-31",
        "https://arxiv.org/abs/2401.18079",
    ),
    OWN: Paper(
        "Statements of our own, made while checking the papers'",
        "the kvtheory developers",
        "2026-11-29",
        "docs/findings.md",
    ),
}
