"""The evaluation tasks: their data, their prompts, and how answers are read and judged.

The hashes are of prompts that were compared, for every item and both forms, with what
lm-evaluation-harness's own samplers and templates (commit 4e7e0d47) make of the same data.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache

import pytest

from qkv import tasks
from qkv.tasks import gsm8k, items


@cache
def task_of(name: str, extraction: tasks.Extraction | None = None) -> tasks.Task:
    return tasks.task(name, extraction=extraction)


def digest(prompt: tasks.Prompt) -> str:
    """The start of the SHA-256."""
    text = prompt
    if not isinstance(text, str):
        text = json.dumps(prompt, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# name: items, strata, (key, gold, hash of the question) of the first and the last item
DATA = {
    "gsm8k": (
        1319,
        1,
        ("gsm8k-0", "18", "2b2e3f9639f6fa28"),
        ("gsm8k-1318", "14", "d633d02dadf28293"),
    ),
    "gsm8k_cot": (
        1319,
        1,
        ("gsm8k_cot-0", "18", "2b2e3f9639f6fa28"),
        ("gsm8k_cot-1318", "14", "d633d02dadf28293"),
    ),
    "mgsm": (
        2750,
        11,
        ("mgsm-bn-0", "18", "a0533572d0535629"),
        ("mgsm-zh-249", "5600", "6da5c29136f4700b"),
    ),
    "mmlu": (
        14042,
        57,
        ("mmlu-0", "B", "89b8ed8082380cb5"),
        ("mmlu-14041", "A", "e2d866ccf0c0c0f7"),
    ),
    "mmlu_pro": (
        12032,
        14,
        ("mmlu_pro-70", "I", "73ada9db0f7362d8"),
        ("mmlu_pro-12256", "F", "f2dfd4e6415f0a97"),
    ),
}

# name: start of the first prompt, its end, hashes of the first prompt plain and as a conversation
# and of the last one plain
PROMPTS = {
    "gsm8k": (
        "Question: Jen and Tyler are gymnasts practicing flips.",
        "every day at the farmers' market?\nAnswer:",
        ("32680f263ba83280", "db012dad440da701", "c9c63955e0cf2185"),
    ),
    "gsm8k_cot": (
        "Q: There are 15 trees in the grove.",
        "every day at the farmers' market?\nA:",
        ("901fead9abd2535b", "c6aa63189c8970b6", "5b060fe1533ea376"),
    ),
    "mgsm": (
        "প্রশ্ন: জেনেটের হাঁসগুলি",
        "\nধাপে ধাপে উত্তর:",
        ("ee9a4e6175bfff83", "c8796e24e47c3762", "d4acaa546bfae310"),
    ),
    "mmlu": (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "Find all c in Z_3 such that Z_3[x]/(x^2 + c) is a field.\nA. 0\nB. 1\nC. 2\nD. 3\n"
        "Answer: B\n\n",
        "sqrt(18)) over Q.\nA. 0\nB. 4\nC. 2\nD. 6\nAnswer:",
        ("ff9b00310e214bea", "7031852f8887f0d7", "a5e180fb7b8fc800"),
    ),
    "mmlu_pro": (
        "The following are multiple choice questions (with answers) about business. Think step by "
        'step and then finish your answer with "the answer is (X)" where X is the correct letter '
        "choice.\nQuestion:\n",
        "I. Unsafe practices, Distress, Fear, Serious\nAnswer: Let's think step by step.",
        ("6b59131e453ac23c", "5b9f77e8323cf819", "104e7d68b8b20306"),
    ),
}


def test_names() -> None:
    assert sorted(tasks.names(questions=True)) == sorted(DATA) == sorted(PROMPTS)
    assert set(tasks.names()) - set(DATA) == {"wikitext2", "needle"}
    with pytest.raises(ValueError, match="arc.*must be one of gsm8k"):
        tasks.task("arc")


@pytest.mark.parametrize("name", DATA)
def test_data(name: str) -> None:
    count, strata, first, last = DATA[name]
    questions = task_of(name).questions
    assert len(questions) == len(task_of(name)) == count
    assert len({question.key for question in questions}) == count
    assert len({question.stratum for question in questions}) == strata
    for question, (key, gold, of_text) in ((questions[0], first), (questions[-1], last)):
        assert (question.key, question.gold) == (key, gold)
        assert digest(question.question) == of_text
    assert all(question.gold and question.question for question in questions)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str) -> None:
    start, end, hashes = PROMPTS[name]
    task = task_of(name)
    plain, last = task.item(0), task.item(len(task) - 1)
    assert isinstance(plain.prompt, str)
    assert plain.prompt.startswith(start) and plain.prompt.endswith(end)
    chat = task.item(0, chat=True)
    assert (digest(plain.prompt), digest(chat.prompt), digest(last.prompt)) == hashes


@pytest.mark.parametrize(
    ("name", "shots", "system"),
    [
        ("gsm8k", 5, False),
        ("gsm8k_cot", 8, False),
        ("mgsm", 0, False),
        ("mmlu", 5, True),
        ("mmlu_pro", 5, True),
    ],
)
def test_conversation(name: str, shots: int, system: bool) -> None:
    messages = task_of(name).item(1, chat=True).prompt
    assert isinstance(messages, list)
    roles = ["system"] * system + ["user", "assistant"] * shots + ["user"]
    assert [message["role"] for message in messages] == roles
    plain = task_of(name).item(1).prompt
    assert isinstance(plain, str) and plain.endswith(messages[-1]["content"])


def test_shots_of_gsm8k() -> None:
    """Drawn anew for each item, one after the other, from one generator."""
    drawn = gsm8k.draws(1319, 7473)
    assert drawn[0] == [6374, 3610, 957, 61, 742]
    assert drawn[1] == [7462, 6610, 4769, 286, 5501]
    assert drawn[-1] == [220, 4179, 6064, 5599, 5541]
    assert gsm8k.draws(2, 7473) == drawn[:2]  # the first items have theirs whatever the limit
    train = items.read_rows("gsm8k_train.jsonl.gz")
    assert len(train) == 7473
    prompt = task_of("gsm8k").item(1).prompt
    assert isinstance(prompt, str)
    row = train[7462]
    assert prompt.startswith(f"Question: {row['question']}\nAnswer: {row['answer']}\n\nQuestion: ")


def test_stops_and_bounds() -> None:
    ends = ("</s>", "<|im_end|>")
    for name, asks in (("gsm8k", "Question:"), ("gsm8k_cot", "Q:"), ("mgsm", "প্রশ্ন:")):
        item = task_of(name).item(0)
        assert (item.kind, item.stop, item.max_tokens) == ("generate", (asks, *ends), 256)
        assert item.choices == ()
    item = task_of("mmlu_pro").item(0)
    assert (item.kind, item.stop, item.max_tokens) == ("generate", ("Question:",), 2048)
    item = task_of("mmlu").item(0)
    assert (item.kind, item.stop, item.max_tokens) == ("choice", (), 0)
    assert item.choices == (" A", " B", " C", " D")
    assert task_of("mmlu").item(0, chat=True).choices == ("A", "B", "C", "D")
    assert (task_of("mmlu").chance, task_of("gsm8k").chance) == (0.25, 0.0)
    assert tasks.task("gsm8k", max_tokens=9).item(0).max_tokens == 9
    with pytest.raises(ValueError, match="max_tokens=0: must be within 1 and"):
        tasks.task("gsm8k", max_tokens=0)
    with pytest.raises(ValueError, match="mmlu generates nothing"):
        tasks.task("mmlu", max_tokens=9)
    with pytest.raises(ValueError, match="extraction: mmlu_pro has one way"):
        tasks.task("mmlu_pro", extraction="strict")
    with pytest.raises(ValueError, match="extraction 'loose'"):
        tasks.task("gsm8k", extraction="loose")  # type: ignore[arg-type]


def test_limit() -> None:
    """Without strata the first items; with them the same number of each."""
    assert list(task_of("gsm8k").places(3)) == [0, 1, 2]
    assert len(task_of("mmlu").places()) == 14042 == len(task_of("mmlu").places(20000))
    chosen = list(task_of("mmlu").items(2 * 57))
    subjects = [str(item.stratum) for item in chosen]
    assert subjects == sorted(subjects) and all(subjects.count(name) == 2 for name in subjects)
    assert [item.key for item in chosen[:3]] == ["mmlu-0", "mmlu-1", "mmlu-100"]
    assert len({item.stratum for item in task_of("mgsm").items(11)}) == 11
    with pytest.raises(ValueError, match="limit=0: must be within 1 and"):
        task_of("mmlu").places(0)


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        ("9 * 2 = <<9*2=18>>18\n#### 18", "18", True),
        ("She makes $18.", "$18.", True),
        ("18,", "18,", True),
        ("First 16, then 3, and 18 in the end", "18", True),
        ("18 eggs, no, 19", "19", False),
        ("It is 18.00", "18.00", False),
        ("It is 18.5", "18.5", False),
        ("minus -18", "-18", False),
        ("1,8", "1,8", True),  # commas are dropped wherever they are
        ("so it is 8", "8", False),
        ("I cannot say", None, False),
        ("", None, False),
        ("18 or so...", None, False),  # the last match is "..."
    ],
)
def test_last_number(text: str, answer: str | None, correct: bool) -> None:
    task = task_of("gsm8k")
    expected = {"correct": correct, "answer": answer, "answered": answer is not None}
    assert task.grade(task.item(0), text) == expected


@pytest.mark.parametrize(
    ("name", "text", "answer", "correct"),
    [
        ("gsm8k", "#### 18", "18", True),
        ("gsm8k", "#### 18.", "18.", True),
        ("gsm8k", "#### 18\n\n#### 19", "18", True),  # the first
        ("gsm8k", "#### -18", "-18", False),
        ("gsm8k", "#### $18", None, False),
        ("gsm8k", "####18", None, False),
        ("gsm8k", "The answer is 18.", None, False),
        ("gsm8k_cot", "16 - 3 - 4 = 9. The answer is 18.", "18", True),
        ("gsm8k_cot", "The answer is 18. The answer is 19.", "18.", True),
        ("gsm8k_cot", "The answer is 18", "1", False),  # the pattern wants one character more
        ("gsm8k_cot", "The answer is ...", None, False),
        ("gsm8k_cot", "It is 18.", None, False),
        ("mgsm", "The answer is 18.", "18.", True),
        ("mgsm", "The answer is -1.8", "-1.8", True),  # punctuation does not count there
    ],
)
def test_strict(name: str, text: str, answer: str | None, correct: bool) -> None:
    task = task_of(name, "strict")
    expected = {"correct": correct, "answer": answer, "answered": answer is not None}
    assert task.grade(task.item(0), text) == expected


def test_gold_answers_are_right() -> None:
    """What the data sets hold as the worked answer is graded as correct."""
    for extraction in ("flexible", "strict"):
        task = task_of("gsm8k", extraction)
        large = [place for place, item in enumerate(task.questions) if len(item.gold) > 4]
        assert len(large) > 10
        for place in large:  # "#### 114,200" among them
            item = task.item(place)
            assert task.grade(item, item.question.answer)["correct"], item.key


@pytest.mark.parametrize(
    ("stratum", "text"),
    [
        ("de", "Die Antwort lautet 18."),
        ("en", "The answer is 18."),
        ("fr", "La réponse est 18."),
        ("ja", "答えは18です。"),
        ("ru", "Ответ — 18."),
        ("zh", "答案是 18。"),
    ],
)
def test_languages(stratum: str, text: str) -> None:
    task = task_of("mgsm", "strict")
    place = next(i for i, item in enumerate(task.questions) if item.stratum == stratum)
    item = task.item(place)
    assert item.reference == "18"
    assert task.grade(item, text) == {
        "correct": True,
        "answer": "18." if text.endswith(".") else "18",
        "answered": True,
    }
    assert not task.grade(item, text.replace("18", "81"))["correct"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("... so the answer is (I).", "I"),
        ("The answer is I", "I"),
        ("the answer is (I) and not: the answer is (B)", "I"),
        ("the answer is (b)", None),
        ("the answer is (K)", None),
        ("I", None),
        ("", None),
    ],
)
def test_letter(text: str, answer: str | None) -> None:
    task = task_of("mmlu_pro")
    expected = {"correct": answer == "I", "answer": answer, "answered": answer is not None}
    assert task.grade(task.item(0), text) == expected


def test_choice() -> None:
    task = task_of("mmlu")
    item = task.item(0)
    assert item.reference == "B"
    assert task.grade(item, [-3.0, -1.0, -2.0, -math.inf]) == {
        "correct": True,
        "answer": "B",
        "answered": True,
    }
    assert task.grade(item, [-1.0, -1.0, -2.0, -2.0])["answer"] == "A"  # the first of equals
    with pytest.raises(ValueError, match="mmlu-0: 3 log-likelihoods for 4 choices"):
        task.grade(item, [-1.0, -2.0, -3.0])
    with pytest.raises(ValueError, match="mmlu-0: .*not a number"):
        task.grade(item, [-1.0, math.nan, -3.0, -4.0])
    with pytest.raises(ValueError, match="log-likelihoods of the choices, not a text"):
        task.grade(item, "B")
    with pytest.raises(ValueError, match="a generated text, not"):
        task_of("gsm8k").grade(task_of("gsm8k").item(0), [-1.0])


def test_choice_none_is_a_word() -> None:
    """Ten items have it, where a reader of tables would see a missing value."""
    rows = items.read_rows("mmlu_test.jsonl.gz")
    places = [place for place, row in enumerate(rows) if "None" in row["choices"]]
    assert places == [1006, 1090, 1104, 1117, 1156, 1429, 1961, 1988, 2027, 2037]
    assert all(isinstance(choice, str) for row in rows for choice in row["choices"])
    task = task_of("mmlu")
    prompt = task.item(1006).prompt
    assert isinstance(prompt, str)
    assert prompt.endswith("\nA. None\nB. III only\nC. I and II only\nD. I, II, and III\nAnswer:")
    right = [place for place in places if rows[place]["choices"][rows[place]["answer"]] == "None"]
    assert all(task.questions[place].answer == "None" for place in right)


def test_inconsistent_row_of_mmlu_pro() -> None:
    """One row's letter and index disagree; the letter counts."""
    rows = items.read_rows("mmlu_pro_test.jsonl.gz")
    odd = [row for row in rows if "ABCDEFGHIJ"[row["answer_index"]] != row["answer"]]
    assert [(row["question_id"], row["answer"], row["answer_index"]) for row in odd] == [
        (3983, "C", 1)
    ]
    task = task_of("mmlu_pro")
    place = next(i for i, item in enumerate(task.questions) if item.key == "mmlu_pro-3983")
    item = task.item(place)
    assert (item.reference, item.question.answer) == ("C", "N—H")
    assert task.grade(item, "the answer is (C)")["correct"]
    assert not task.grade(item, "the answer is (B)")["correct"]


def test_licences_are_there() -> None:
    folder = items.DATA
    named = {path.name for path in folder.iterdir()}
    for name in {*tasks.names()} - {"needle"}:  # which is made of wikitext2
        assert f"LICENSE.{name}" in named, name
    sources = (folder / "SOURCES.md").read_text(encoding="utf-8")
    for path in folder.glob("*.gz"):
        assert path.name.split(".")[0] in sources, path.name
