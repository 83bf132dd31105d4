"""A claim's formula as TeX and as MathML.

Claims state their formulas once, in the Unicode that a terminal shows: `E‖do‖² = Σ_i a_i² ‖v_i W_O − o‖²`. `tex` reads that
notation, which leaves little to guess, and `mathml` has latex2mathml turn the TeX into markup that browsers draw by themselves.

The notation: `_` and `^` take a group in braces (after `^` also in parentheses), or the letters, digits and primes that follow,
with a leading `<`, `≤` or `−`; Unicode superscripts and subscripts mean themselves. Two spaces part what may stand on lines of
its own. Latin letters in a row are a word, unless they are named below as an operator or a product.
"""

from __future__ import annotations

import functools
import html
import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀ", "0123456789+-T")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉ᵢⱼₖₘₙ", "0123456789ijkmn")
_GREEK = {
    "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ω": "Omega", "α": "alpha", "β": "beta",
    "γ": "gamma", "δ": "delta", "ε": "varepsilon", "η": "eta", "θ": "theta", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "π": "pi",
    "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "varphi", "χ": "chi", "ψ": "psi", "ω": "omega",
}  # fmt: skip
_SIGNS = {
    "−": "-", "·": r"\cdot ", "≤": r"\leq ", "≥": r"\geq ", "≈": r"\approx ", "≠": r"\neq ", "≡": r"\equiv ", "∈": r"\in ", "∉": r"\notin ",
    "⊆": r"\subseteq ", "∝": r"\propto ", "∞": r"\infty ", "∧": r"\wedge ", "∫": r"\int ", "∏": r"\prod ", "→": r"\to ", "↓": r"\downarrow ",
    "↦": r"\mapsto ", "⇒": r"\Rightarrow ", "⇔": r"\Leftrightarrow ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "…": r"\ldots ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "×": r"\times ", "~": r"\sim ", "½": r"\tfrac{1}{2}", "#": r"\#", "{": r"\{",
    "}": r"\}", "⊥": r"\perp ", "%": r"\%", "↑": r"\uparrow ", "∂": r"\partial ", "∇": r"\nabla ", "∅": r"\emptyset ", "′": "'",
    "∀": r"\forall ", "∃": r"\exists ", "⊕": r"\oplus ", "⊗": r"\otimes ", "∘": r"\circ ", "¬": r"\neg ", "&": r"\&", "$": r"\$", "\\": r"\setminus ",
}  # fmt: skip
_ACCENTS = {"\u0302": "hat", "\u0304": "bar", "\u0303": "tilde", "\u0307": "dot"}
_OPERATORS = {
    "log", "min", "max", "sup", "inf", "det", "tr", "argmax", "argmin", "corr", "Var", "Cov", "rank", "dist", "conv", "supp", "mod", "sin", "cos",
    "tan", "exp", "err", "eig", "tail", "len", "est", "sign", "diag", "dim",
}  # fmt: skip
#: what TeX itself knows; the others go through \operatorname
_KNOWN = {"log", "min", "max", "sup", "inf", "det", "sin", "cos", "tan", "exp", "dim"}
#: letters side by side that are multiplied
_PRODUCTS = {"SS", "WS", "kk", "Ax", "LL", "Te", "Me", "MT", "MU", "bd", "TT", "xx", "qq", "jh", "kv", "hi", "ic"}
_DIFFERENTIALS = {"do", "dk", "dv", "dP", "dt", "dx"}
_LETTERS = r"[A-Za-z]"
_MARK = "[\u0302\u0303\u0304\u0307]"
_TOKEN = re.compile(
    rf"""(?P<space>\s+)
    |(?P<number>\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)
    |(?P<dots>\.\.+)
    |(?P<word>(?:(?!{_LETTERS}{_MARK}){_LETTERS}){{2,}}(?:-(?!{_LETTERS}{_MARK}){_LETTERS}{{2,}})*|{_LETTERS}-{_LETTERS}{{2,}})
    |(?P<letter>[A-Za-zΑ-ω]{_MARK}?)
    |(?P<up>[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀ]+)
    |(?P<down>[₀₁₂₃₄₅₆₇₈₉ᵢⱼₖₘₙ]+)
    |(?P<floor>//)
    |(?P<sign>.)""",
    re.X | re.S,
)
#: what `_` takes without braces: a relation, letters with marks, primes, digits; `t−1`; `O,c`
_BARE = re.compile(rf"[<≤≥>]?(?:[A-Z]+,[a-z](?!{_LETTERS})|(?:[A-Za-zΑ-ω]{_MARK}?)+['′]?[a-z]?\d*|\d+)(?:[−+]\d+)?")
#: what `^` takes: a minus, then a number or a letter with its own prime and subscript
_RAISED = re.compile(rf"−?(?:½|\d+(?:\.\d+)?|[A-Za-zΑ-ω]{_MARK}?['′]?(?:_[A-Za-z0-9]+)?)")


class FormulaError(ValueError):
    """A formula that this notation does not have, with the place."""


def _group(text: str, start: int, brackets: str) -> int:
    """The place behind the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == brackets[0]) - (text[i] == brackets[1])
        if not depth:
            return i + 1
    raise FormulaError(f"{brackets[0]!r} at {start} is never closed: {text!r}")


def _letter(text: str) -> str:
    base = _GREEK.get(text[0])
    plain = f"\\{base} " if base else text[0]
    for mark in text[1:]:
        plain = f"\\{_ACCENTS[mark]}{{{plain.strip()}}}"
    return plain


def _word(word: str) -> str | None:
    """TeX of a row of letters that stands for mathematics; None for one of English."""
    if word in _OPERATORS:
        return f"\\{word} " if word in _KNOWN else f"\\operatorname{{{word}}}"
    if word in _DIFFERENTIALS:
        return f"\\mathrm{{d}}{word[1]}"
    if word in _PRODUCTS:
        return word
    if word == "KVhat":
        return r"\widehat{\mathrm{KV}}"
    return r"\mathrm{KV}" if word == "KV" else None


def _index(text: str) -> str:
    """TeX of a subscript without braces: indices side by side in italics, names upright."""
    relation = text[0] if text[0] in "<≤≥>" else ""
    body = text[len(relation) :]
    letters = re.match(r"[A-Za-z]+", body)
    if letters and letters[0] in _OPERATORS | {"KV"} | {w for w in [letters[0]] if len(w) > 2}:
        inner = f"\\mathrm{{{letters[0]}}}" + _tex(body[letters.end() :])
    else:
        inner = "".join(_tex(c) for c in re.findall(rf".{_MARK}*", body))
    return _SIGNS.get(relation, relation) + inner


def _is_sum(text: str, at: int) -> bool:
    """Whether the Σ at `at` sums, rather than names a covariance."""
    before, after = text[:at].rstrip(), text[at + 1 :]
    # a letter or a transpose touching it multiplies; after tr, det and rank stands a matrix
    if at and (text[at - 1].isalpha() or text[at - 1] in "ᵀ⁻¹"):
        return False
    if re.search(r"(?:\btr|\bdet|\brank)$", before):
        return False
    if after.startswith(("_{P", "_ε", "_P")):
        return False
    return not (not after or re.match(r"⁺|\s*[)/,;]|\s+[=<>≤≥]|\s+det|\s+T|[A-ZΑ-Ω]", after))


def tex(formula: str) -> list[str]:
    """TeX of each part of a formula (parts are two spaces apart), in order. FormulaError names what is not closed."""
    # letters with accents are taken apart; signs such as ≠ are meant whole
    text = "".join(unicodedata.normalize("NFD", c) if c.isalpha() else c for c in formula).replace("log2", "log₂")
    return [_tex(part).strip() for part in re.split(r"\s{2,}", text.strip())]


def _tex(text: str) -> str:
    out: list[str] = []
    english: list[str] = []
    began = at = 0

    def flush() -> None:
        """English as one text, with the spaces that stand around it."""
        if english:
            before = r"\ " if text[began - 1 : began] == " " else ""
            after = r"\ " if " " in text[at - 1 : at + 1] else ""
            out.append(
                (before if began else "") + r"\text{" + " ".join(english) + "}" + (after if at < len(text) else "")
            )
            english.clear()

    while at < len(text):
        rest = text[at:]
        if text[at] == "_":
            if text[at + 1 : at + 2] == "{":
                end = _group(text, at + 1, "{}")
                inner = _tex(text[at + 2 : end - 1]).strip()
            else:
                bare = _BARE.match(text, at + 1)
                if bare is None:
                    raise FormulaError(f"nothing to lower at {at}: {text!r}")
                end, inner = bare.end(), _index(bare[0]).strip()
                if english and len(bare[0]) > 2 and not out:
                    english[-1] += r"\_" + bare[0]  # a function's own name
                    at = end
                    continue
            flush()
            out.append(f"_{{{inner}}}")
            at = end
            continue
        if text[at] == "^":
            if text[at + 1 : at + 2] in ("{", "("):
                end = _group(text, at + 1, "{}" if text[at + 1] == "{" else "()")
                inner = _tex(text[at + 2 : end - 1]).strip()
            else:
                raised = _RAISED.match(text, at + 1)
                if raised is None:
                    raise FormulaError(f"nothing to raise at {at}: {text!r}")
                end, inner = raised.end(), _tex(raised[0]).strip()
            flush()
            out.append(f"^{{{inner}}}")
            at = end
            continue
        if text[at] == "√":
            rooted = at + 1
            if text[rooted : rooted + 1] == "(":
                end = _group(text, rooted, "()")
                inner = _tex(text[rooted + 1 : end - 1])
            else:
                atom = re.compile(rf"(?:[A-Za-zΑ-ω]{_MARK}?|\d+)(?:_[A-Za-z0-9]+)?").match(text, rooted)
                if atom is None:
                    raise FormulaError(f"nothing under the root at {at}: {text!r}")
                end, inner = atom.end(), _tex(atom[0])
            flush()
            out.append(f"\\sqrt{{{inner.strip()}}}")
            at = end
            continue
        token = _TOKEN.match(text, at)
        assert token is not None
        kind, value = token.lastgroup, token[0]
        end = token.end()
        if kind == "word":
            mathematics = _word(value)
            if mathematics is None:
                began = began if english else at
                english.append(value)
            else:
                flush()
                out.append(mathematics)
        elif kind == "letter" and value in "a" and english and re.match(rf"\s+{_LETTERS}{{2,}}", text[end:]):
            english.append(value)  # the article
        elif kind == "space":
            if (
                english
                and re.match(r"\s*[^A-Za-z\s]", rest) is None
                and re.match(rf"\s+{_LETTERS}{{2,}}|\s+a\s+{_LETTERS}{{2,}}", rest)
            ):
                pass  # more English follows
            elif english:
                flush()
            else:
                out.append(" ")
        else:
            flush()
            symbol = _symbol(kind, value, text, at, end)
            if kind == "up" and out and out[-1].startswith("^{"):
                out[-1] = out[-1][:-1] + symbol[2:]  # TeX has one exponent to a base
            else:
                out.append(symbol)
        at = end
    flush()
    return re.sub(r" +", " ", "".join(out)).replace(r"\ \ ", r"\ ")


def _symbol(kind: str | None, value: str, text: str, at: int, end: int) -> str:
    """TeX of one token that is neither a word nor raised nor lowered."""
    if kind == "number":
        return value.replace(",", "{,}")
    if kind == "dots":
        return r"\ldots "
    if kind == "up":
        return f"^{{{value.translate(_SUPERSCRIPTS)}}}".replace("T}", r"\mathsf{T}}")
    if kind == "down":
        base = "" if at and (text[at - 1].isalnum() or text[at - 1] in "\u0302\u0304") else "{}"
        return f"{base}_{{{value.translate(_SUBSCRIPTS)}}}"
    if kind == "floor":
        return r"\,/\!/\,"
    if kind == "letter":
        if value == "E" and re.match(r"_ν|\s*[‖(⟨[Σ]|\s+[A-Za-zΑ-ω∫]", text[end:]) and not text[:at].endswith("_"):
            return r"\mathbb{E}" + (r"\," if text[end : end + 1] != "_" else "")
        if value == "Σ" and _is_sum(text, at):
            return r"\sum "
        if value == "Π" and re.match(r"_[{l]", text[end:]):
            return r"\prod "
        return _letter(value)
    if value == "‖":
        return r"\|"
    if value == "|":
        return r"\mid " if text[at - 1 : at] == " " and text[end : end + 1] == " " else "|"
    if value == ":" and text[end : end + 1] == " ":
        return r":\;"
    if value == "⊥" and at and text[at - 1].isalpha():
        return r"_{\perp}"
    return _SIGNS.get(value, value)


#: characters that latex2mathml marks as identifiers, and which are operators with the space of one
_OPERATOR_ENTITIES = re.compile(r"<mi>(&#x0(?:00B1|007E|27F9|21D2|21D4|2193|2191);)</mi>")


@functools.cache
def mathml(part: str) -> str:
    """MathML of one part's TeX, as an inline element."""
    from latex2mathml.converter import convert

    markup = _OPERATOR_ENTITIES.sub(r"<mo>\1</mo>", convert(part))
    # the fence characters stand alone as often as in pairs: none of them stretches
    markup = markup.replace("<mo>&#x0007C;</mo>", '<mo stretchy="false">&#x0007C;</mo>')
    return markup.replace(' display="inline"', f' data-tex="{html.escape(part)}"', 1)


def rendered(formula: str) -> str | None:
    """The formula as MathML elements with room to break lines between them; None where it cannot be read as one."""
    try:
        return " ".join(f'<span class="part">{mathml(part)}</span>' for part in tex(formula))
    except (ImportError, ValueError, LookupError):
        return None
