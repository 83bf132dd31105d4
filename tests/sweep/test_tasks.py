"""Questions with known answers: what is asked, what counts as right, hostile files, and scores over what the full cache solves."""

import json
import re
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

import reference
from kvtheory.cli import on_tasks, ranked
from kvtheory.models import tasks
from tests.sweep.test_compare import SPLIT, command
from tests.sweep.test_kept import FILLER, its_source, model  # noqa: F401  (fixtures)

pytest.importorskip("torch")
pyarrow = pytest.importorskip("pyarrow.parquet")

TOKENS = 420


@pytest.fixture
def runner(model, monkeypatch):  # noqa: F811
    from kvtheory.cli.on_model import _runner
    from kvtheory.models import texts

    monkeypatch.setattr(texts, "text", lambda name: FILLER)
    on_tasks._posed.cache_clear()
    found = _runner(model)
    # a rotary model of random weights reads on behind the positions that it says
    monkeypatch.setattr(found.model.config, "max_position_embeddings", 4096)
    return found


# -- generated ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_a_generated_question_has_its_answer_in_its_text(kind, runner):
    seen = set()
    for number in range(6):
        item = tasks.generate(kind, number, runner.tokenizer, tokens=TOKENS, seed=3)
        assert item == tasks.generate(kind, number, runner.tokenizer, tokens=TOKENS, seed=3)
        (code,) = item.answers
        thing = re.search(r"What is the code of the (\w+ \w+)\?$", item.prompt)[1]
        said = dict(
            re.findall(r"^(\w+ \w+): (\d{5})$", item.prompt, re.M)
            if kind == "lookup"
            else re.findall(r"code of the (\w+ \w+) is (\d{5})\.", item.prompt)
        )
        same = dict(re.findall(r"code of the (\w+ \w+) is the same as the code of the (\w+ \w+)\.", item.prompt))
        assert said[same.get(thing, thing)] == code and thing in item.opening
        assert len(same) == (tasks._LINKS if kind == "tracking" else 0)
        assert len(said) == {"needle": 1, "needles": 4, "tracking": 1}.get(kind, len(said)) and len(
            set(said.values())
        ) == len(said)
        length = len(tasks.pose(runner, item).prompt)
        # one more line, or one more sentence of the filler (27 characters at most), would not have fitted
        assert TOKENS - 28 < length <= TOKENS
        seen.add((thing, code))
    assert len(seen) == 6


def test_too_few_tokens_and_unknown_kinds_are_said(runner):
    with pytest.raises(ValueError, match=r"task-tokens: expected at least \d+ for the question and its code, got 20"):
        tasks.generate("needle", 0, runner.tokenizer, tokens=20)
    with pytest.raises(ValueError, match="task: expected one of needle, needles, tracking, lookup, got 'haystack'"):
        tasks.generate("haystack", 0, runner.tokenizer, tokens=99)


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "said", "answers", "expected"),
    [
        ("exact", " The Paris.\nMore", ["paris"], 1), ("exact", "Paris, France", ["Paris"], 0), ("exact", "B", ["A", "b"], 1),
        ("starts", " 12345.", ["12345"], 1), ("starts", "123456", ["12345"], 0), ("starts", "It is 12345", ["12345"], 0),
        ("contains", "so it was in Paris, then", ["Paris"], 1), ("contains", "a parish", ["paris"], 0), ("contains", "x", ["y"], 0),
        ("all", "first 3 and 5", ["3", "5", "7"], 2 / 3), ("contains", "first 3 and 5", ["3", "5", "7"], 1),
        ("f1", "the cat sat", ["cat sat down"], 0.8), ("f1", "dog", ["cat"], 0), ("f1", "cat cat", ["cat"], 2 / 3),
        ("number", "So 3 + 4 = 1,007.", ["#### 1007"], 1), ("number", "7.50", ["7.5"], 1), ("number", "none", ["7"], 0), ("number", "-7", ["7"], 0),
        ("choice", "The answer is (C).", ["C"], 1), ("choice", "B) since C", ["(C)"], 0), ("choice", "Cat", ["C"], 0),
    ],
)  # fmt: skip
def test_what_counts_as_right(metric, said, answers, expected):
    assert tasks.score(metric, said, answers) == pytest.approx(expected)


def test_every_metric_is_full_for_the_answer_and_nothing_for_silence():
    for metric in tasks.METRICS:
        right = "C" if metric == "choice" else "42"
        assert tasks.score(metric, right, [right]) == 1.0 and tasks.score(metric, "", [right]) == 0.0
    with pytest.raises(ValueError, match="metric: expected one of"):
        tasks.score("rouge", "a", ["a"])


# -- files -------------------------------------------------------------------------------------------------------------

GOOD = {"prompt": "1 + 1 =", "answer": "2", "metric": "exact"}


def test_a_data_set(tmp_path):
    path = tmp_path / "sums.jsonl"
    more = {
        "prompt": "Say é",
        "answer": ["é", "e"],
        "metric": "f1",
        "task": "letters",
        "opening": "It is",
        "max_new_tokens": 3,
        "id": 7,
    }
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(more, ensure_ascii=False), encoding="utf-8")
    items, digest = tasks.read(path)
    assert items == [
        tasks.Item("sums", "1 + 1 =", ("2",), "exact"), tasks.Item("letters", "Say é", ("é", "e"), "f1", "It is", 3)
    ]  # fmt: skip
    assert re.fullmatch("[0-9a-f]{16}", digest)
    asked = on_tasks.read([str(path), "lookup"], 1, 99, 5)
    assert [(a.task, a.number, a.origin) for a in asked] == [("sums", 0, digest), ("lookup", 0, "generated")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"\xff\xfe", "expected UTF-8"), (b"nothing", "expected JSON"), (b"[" * 100_000, "expected JSON"), (b'{"prompt": 1', "expected JSON"),
        (b"1" * 5000, "expected JSON"), (b"[1]", "expected an object with prompt, answer and metric, got a list"),
        ({"prompt": None}, "prompt: expected a string, got nothing"), ({"prompt": " "}, "prompt: expected a string that is not empty"),
        ({"answer": []}, "answer: expected a string or some, got none"), ({"answer": ["2", 2]}, "answer 2: expected a string, got a number"),
        ({"answer": {"a": 1}}, "answer: expected a string, got an object"), ({"metric": "bleu"}, "metric: expected one of exact, "),
        ({"metric": "x" * 9999}, "metric: expected one of"), ({"task": 3}, "task: expected a string"), ({"prompt": "\ud800"}, "half of a character"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number from 1 to 1024"), ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": 1e9}, "max_new_tokens"),
    ],
)  # fmt: skip
def test_hostile_lines_are_one_sentence(line, said, tmp_path):
    path = tmp_path / "bad.jsonl"
    line = line if isinstance(line, bytes) else json.dumps({**GOOD, **line}).encode()
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"^tasks: line 2 of bad\.jsonl") as problem:
        tasks.read(path)
    assert said in str(problem.value) and "\n" not in str(problem.value) and len(str(problem.value)) < 200


def test_a_line_without_an_end_and_an_empty_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "MOST_LINE", 100)
    (tmp_path / "long.jsonl").write_bytes(b" " * 101)
    with pytest.raises(ValueError, match=r"line 1 of long\.jsonl: expected at most 100 bytes"):
        tasks.read(tmp_path / "long.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"\n \n")
    with pytest.raises(ValueError, match=r"expected lines of JSON in empty\.jsonl, got none"):
        tasks.read(tmp_path / "empty.jsonl")


def test_the_command_refuses_in_one_sentence(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("{}")
    for arguments, said in (
        (["--cache", "sample", "--tasks", "needle"], "tasks: expected --model, which answers, with it"),
        (["--model", "smol", "--tasks", path], "line 1 of bad.jsonl: prompt: expected a string, got nothing"),
        (["--model", "smol", "--tasks", tmp_path / "absent"], "and no task of that name; there are generated, needle"),
        (["--model", "smol", "--tasks", tmp_path], "and no task of that name"),
    ):
        code, output = command(*arguments, "--out", tmp_path / "out")
        assert code == 2 and said in output, output
    assert not (tmp_path / "out").exists()


# -- answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_is_the_greedy_one(runner):
    """Whatever the first answer is: token by token, the one ranked first, from the first pass or not."""
    prompt = "Once upon a time there was"
    ids = tasks.pose(runner, tasks.Item("t", prompt, ("x",), "contains", most=6), "plain").prompt
    greedy = []
    for _ in range(6):
        fed = np.concatenate([ids, np.asarray(greedy, dtype=np.int64)])
        greedy.append(int(runner.logits(fed, len(ids) - 1)[-1].argmax()))
    text = runner.tokenizer.decode(greedy)
    for first in (text, text[:3], text[:2] + "~", "~"):
        said = tasks.answer(
            runner, tasks.pose(runner, tasks.Item("t", prompt, (first,), "contains", most=6), "plain"), None
        )
        assert said.text == text, (first, said.text)
    whole = tasks.pose(runner, tasks.Item("t", prompt, (text[:4],), "starts", most=6), "plain")
    said = tasks.answer(runner, whole, None)
    bits = np.log2(np.e) * np.asarray(
        runner.logits(np.concatenate([whole.prompt, whole.target]), whole.prefix), dtype=float
    )
    law = bits - np.logaddexp2.reduce(bits, axis=1, keepdims=True)
    assert said.log2_p == pytest.approx(sum(law[i, t] for i, t in enumerate(whole.target)), abs=1e-3)
    with pytest.raises(ValueError, match="prompt: expected at most"):
        tasks.pose(runner, tasks.Item("t", "x" * 100_000, ("y",), "exact"), "plain")


def test_rows_are_of_what_the_bytes_hold(runner, model, its_source, tmp_path):  # noqa: F811
    from kvtheory.models import capture

    item = tasks.Item("own", "Say it once more: " + FILLER * 2, ("zebra",), "contains", most=4)
    asked = [on_tasks.Asked("own", 0, "0" * 16, None, None, item), *on_tasks.read(["needle"], 1, TOKENS, 0)]
    codecs = (reference.Full(), reference.SnapKV(keep=0.1, sinks=1, window=4))
    planned = on_tasks.plan(its_source, model, codecs, None, SPLIT, asked)
    assert len({task.name for task in planned}) == 4
    rows = [{**task.key, **row} for task in planned for row in task.run(*task.arguments)]
    posed = tasks.pose(runner, item)
    decoded = [
        codecs[1].reduce(layer.replace(keys=layer.keys.astype(np.float16), values=layer.values.astype(np.float16)))
        for layer in capture(runner.model, None, posed.prompt[: posed.prefix])
    ]
    plain, reduced = (tasks.answer(runner, posed, d) for d in (None, decoded))
    own = rows[1]
    assert (own["full_said"], own["said"]) == (plain.text, reduced.text)
    assert own["log2_p"] == pytest.approx(reduced.log2_p, rel=1e-9) and own["log2_p"] != own["full_log2_p"]
    assert rows[0]["log2_p"] == pytest.approx(rows[0]["full_log2_p"], abs=0.05) and rows[0]["origin"] == "0" * 16
    assert rows[2]["task"] == "needle" and rows[2]["item_seed"] == 0 and rows[0]["item_seed"] is None
    table = pyarrow.read_table(on_tasks.write(tmp_path, rows))
    assert table.column_names == list(on_tasks.TASK_COLUMNS) and table.to_pylist()[1]["said"] == reduced.text


def rows_by_hand(codec, scores, full, bits=2):
    usual = {
        "model": "m",
        "task": "t",
        "origin": "generated",
        "parameters": "{}",
        "state": "",
        "prefill": None,
        "bits": bits,
        "held_bits": 2.5,
    }
    return [
        {**usual, "codec": codec, "item": i, "score": s, "full_score": f, "log2_p": -3.0 - i, "full_log2_p": -1.0}
        for i, (s, f) in enumerate(zip(scores, full, strict=True))
    ]


def test_scores_are_over_what_the_full_cache_solves():
    rows = rows_by_hand("A", [1, 0, 1, 0.5], [1, 1, 0, 0.5]) + rows_by_hand("B", [1, 0.5, 0, 0], [1, 1, 0, 0.5])
    a, b = on_tasks.summarise(rows)
    assert (a.items, a.solved, a.kept_right, a.score, a.full_score) == (4, 2, 0.5, 0.625, 0.625)
    assert a.interval.low < 0.02 and a.interval.high > 0.98  # one of two
    assert (b.solved, b.kept_right, b.interval) == (2, 0.75, None)  # half a point is no trial
    assert a.loss_bits.estimate == pytest.approx(np.mean([2, 3, 4, 5]))
    (none,) = on_tasks.summarise(rows_by_hand("A", [1, 1], [0, 0]))
    assert (none.solved, none.kept_right, none.interval, none.score) == (0, None, None, 1.0)

    written = StringIO()
    console = Console(file=written, width=300)
    ranked.show(console.print, console.print, [], [a, b])
    assert (
        "t: the full cache solves 2 of 4 (mean score 0.625)" in written.getvalue()
        and "says nothing" not in written.getvalue()
    )
    ranked.show(console.print, console.print, [], [none])
    assert "the full cache solves none: this task says nothing of any codec here" in written.getvalue()


def test_the_table_is_documented():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    for name in (*on_tasks.TASK_COLUMNS, *tasks.METRICS, *tasks.KINDS):
        assert f"`{name}`" in page, name
