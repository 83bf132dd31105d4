"""Every claim's formula becomes TeX and MathML; the notation is read as it is meant."""

from xml.etree import ElementTree

import pytest

import proofs_checks
from proofs_checks.report import formulas

pytest.importorskip("latex2mathml")


def test_every_formula_is_rendered():
    for claim in proofs_checks.claims().values():
        shown = formulas.rendered(claim.formula)
        assert shown is not None, claim.id
        tree = ElementTree.fromstring(f"<p>{shown}</p>".replace("xmlns=", "was="))
        maths = tree.findall(".//math")
        assert len(maths) == len(formulas.tex(claim.formula)) and all(len(m) for m in maths), claim.id
        # nothing of the notation is left over for the reader to decode
        assert not set("^_\\²ᵀ√½") & set("".join(tree.itertext()).replace("\\_", "").replace("_bits", "")) - {"^"}, (
            claim.id
        )


@pytest.mark.parametrize(
    ("formula", "tex"),
    [
        ("E‖do‖² = Σ_i a_i²", [r"\mathbb{E}\|\mathrm{d}o\|^{2} = \sum _{i} a_{i}^{2}"]),
        ("q_h'ᵀ M W_O^hᵀ", [r"q_{h'}^{\mathsf{T}} M W_{O}^{h\mathsf{T}}"]),
        ("H(KV_t | KV_<t) ≤ |V|", [r"H(\mathrm{KV}_{t} \mid \mathrm{KV}_{<t}) \leq |V|"]),
        ("4^(−b);  2^−b'_i", ["4^{-b};", "2^{-b'_{i}}"]),
        ("tr Σ/K, TΣTᵀ, Σ p²", [r"\operatorname{tr} \Sigma /K, T\Sigma T^{\mathsf{T}}, \sum p^{2}"]),
        ("log2 10, log₂⁺ x", [r"\log _{2} 10, \log _{2}^{+} x"]),
        ("bits a number = b for all P̂", [r"\text{bits a number}\ = b \ \text{for all}\ \hat{P}"]),
        ("√(1 − D), √d, ½", [r"\sqrt{1 - D}, \sqrt{d}, \tfrac{1}{2}"]),
    ],
)
def test_the_notation(formula, tex):
    assert [part.replace(r"\,\|", r"\|") for part in formulas.tex(formula)] == tex


def test_what_is_no_formula_stays_text():
    assert formulas.rendered("a_{b") is None and formulas.rendered("x^") is None
    with pytest.raises(formulas.FormulaError, match="never closed"):
        formulas.tex("a_{b")
