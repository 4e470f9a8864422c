"""Contamination by numbers: planted items are found with the coverage counted by hand, and clean text has no hit."""

import pickle
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

from recipes.errors import ConfigError
from recipes.prepare.contamination import EvaluationSet, Hit, _passage
from recipes.prepare.ngrams import split_words

# 30 words, by line 10 each
QUESTION = """A farmer has seven brown hens and four white ducks,
which together lay fifty eggs every week. How many weeks
pass before he has collected enough eggs for his market?"""
OTHERS = [
    (
        "train",
        "Two trains leave the same station at noon and travel in opposite directions; after how long do they meet?",
    ),
    ("river", "Name the longest river that crosses more than three countries without ever reaching an ocean or a sea."),
    ("moon", "If the moon were twice as far from the earth as it is today, how long would a month last, and why?"),
    ("poem", "Who wrote the poem in which a traveller meets two legs of stone standing without a trunk in a desert?"),
]


def make(*items: tuple[str, str], min_coverage: float = 0.5, **settings: Any) -> EvaluationSet:
    return EvaluationSet(items, min_coverage=min_coverage, **settings)


def words(start: int, stop: int) -> str:
    return " ".join(QUESTION.split()[start:stop])


def around(passage: str) -> str:
    """Return a document of 400 other words with a passage in its middle."""
    text = topics["with"].split()
    return " ".join([*text[:200], passage, *text[200:400]])


def test_a_planted_item_is_found_whole() -> None:
    hits = make(("farm", QUESTION), *OTHERS).find(around(QUESTION))
    assert hits == [Hit("farm", 1.0, QUESTION)]


@pytest.mark.parametrize(("start", "stop"), [(0, 13), (5, 20), (17, 30), (0, 29)])
def test_coverage_is_the_share_of_words_in_the_passage(start: int, stop: int) -> None:
    hits = make(("farm", QUESTION), *OTHERS).find(around(words(start, stop)))
    assert [(hit.item, hit.coverage) for hit in hits] == [("farm", (stop - start) / 30)]
    assert hits[0].evidence.split() == words(start, stop).split()


def test_twelve_words_are_no_hit() -> None:
    assert make(("farm", QUESTION)).find(around(words(0, 12))) == []


def test_two_passages_count_together_and_common_words_once() -> None:
    questions = make(("farm", QUESTION))
    apart = questions.find(around(words(0, 13)) + " " + around(words(17, 30)))
    assert apart[0].coverage == 26 / 30
    overlapping = questions.find(around(words(0, 14)) + " " + around(words(10, 25)))
    assert overlapping[0].coverage == 25 / 30
    assert overlapping[0].evidence.split() == words(10, 25).split(), "the longest passage"


@pytest.mark.parametrize(("num_words", "is_contaminated"), [(13, False), (14, False), (15, True), (16, True)])
def test_a_document_is_contaminated_from_the_coverage_on(num_words: int, is_contaminated: bool) -> None:
    questions = make(("farm", QUESTION), min_coverage=0.5)  # 15 of 30 words
    hits = questions.find(around(words(0, num_words)))
    assert len(hits) == 1
    assert questions.is_contaminated(hits) == is_contaminated


def test_a_document_without_hits_is_not_contaminated() -> None:
    assert not make(("farm", QUESTION)).is_contaminated([])


def test_other_case_punctuation_and_lines_are_still_found() -> None:
    changed = "  \n".join(QUESTION.upper().replace(",", " —").replace(".", "...").split())
    assert make(("farm", QUESTION)).find(around(changed)) == [Hit("farm", 1.0, QUESTION)]


def test_other_numbers_are_still_found_unless_digits_are_kept() -> None:
    item = "In a box there are 12 red balls and 30 blue ones; how many are there in all?"
    other = item.replace("12", "7").replace("30", "1999")
    assert make(("box", item)).find(around(other)) == [Hit("box", 1.0, item)]
    assert make(("box", item), mask_digits=False).find(around(other)) == []
    assert make(("box", item), mask_digits=False).find(around(item)) == [Hit("box", 1.0, item)]


def test_the_reference_of_python_has_no_hit_with_questions_of_our_own() -> None:
    questions = make(("farm", QUESTION), *OTHERS)
    assert questions.num_items == 5
    assert [questions.find(text) for text in topics.values()] == [[]] * len(topics)


def test_passages_of_the_reference_are_found_whole_in_the_documents_that_have_them_and_in_no_other() -> None:
    texts = {name: b" ".join(split_words(text)) for name, text in topics.items()}
    items = {name: b" ".join(text.split()[20:50]) for name, text in texts.items() if len(text.split()) > 200}
    questions = make(*((name, item.decode()) for name, item in sorted(items.items())))
    assert questions.num_items - questions.num_boilerplate_items > 30
    for name, text in topics.items():
        whole = {hit.item for hit in questions.find(text) if hit.coverage == 1.0}
        assert whole == {item for item in items if items[item] in texts[name]}


def test_hits_are_sorted_by_coverage_then_by_id() -> None:
    questions = make(("b", QUESTION), ("c", words(0, 20)), ("a", QUESTION))
    hits = questions.find(around(words(0, 20)))
    assert [(hit.item, hit.coverage) for hit in hits] == [("c", 1.0), ("a", 20 / 30), ("b", 20 / 30)]


def test_items_of_8_to_12_words_are_found_only_whole_and_shorter_ones_are_counted() -> None:
    items = [(str(length), words(0, length)) for length in (3, 7, 8, 12)]
    questions = make(*items)
    assert (questions.num_items, questions.num_too_short) == (4, 2)
    assert [hit.item for hit in questions.find(around(words(0, 12)))] == ["12", "8"]
    assert questions.find(around(words(0, 11))) == [Hit("8", 1.0, words(0, 8))]
    assert questions.find(around(words(0, 7))) == []


def instruct(i: int) -> str:
    """Return an item of an instruction of 18 words and 20 words of its own."""
    instruction = "Read the following problem with care, think step by step and write the answer on the last line only:"
    return f"{instruction} {' '.join(f'item{chr(97 + i)}word{chr(97 + j)}' for j in range(20))}"


@pytest.mark.parametrize(("num_items", "num_ngrams"), [(10, 0), (11, 7)])
def test_an_instruction_is_boilerplate_in_more_than_10_items(num_items: int, num_ngrams: int) -> None:
    questions = make(*((str(i), instruct(i)) for i in range(num_items)))
    assert len(split_words(instruct(0))) == 19 + 20
    assert questions.num_boilerplate_ngrams == num_ngrams  # 19 - 13 + 1
    instruction = " ".join(instruct(0).split()[:19])
    assert len(questions.find(around(instruction))) == (0 if num_ngrams else num_items)


def test_boilerplate_does_not_count_for_the_coverage() -> None:
    questions = make(*((str(i), instruct(i)) for i in range(11)))
    hits = questions.find(around(" ".join(instruct(3).split()[19:])))
    # 12 words of the instruction stand in n-grams with words of the item, 7 do not
    assert [(hit.item, hit.coverage) for hit in hits] == [("3", 20 / 32)]
    assert questions.find(around(instruct(3)))[0].coverage == 1.0


def test_the_share_of_items_that_makes_boilerplate_can_be_set() -> None:
    items = [(str(i), instruct(i % 26) + " x" * i) for i in range(40)]
    assert make(*items, max_item_share=1.0).num_boilerplate_ngrams == 0
    assert make(*items, max_item_share=0.5).num_boilerplate_ngrams >= 7


def test_an_item_in_which_all_is_boilerplate_is_counted_and_not_found() -> None:
    questions = make(*((str(i), QUESTION) for i in range(20)), ("river", OTHERS[1][1]))
    assert (questions.num_items, questions.num_boilerplate_items, questions.num_boilerplate_ngrams) == (21, 20, 18)
    assert questions.find(around(QUESTION)) == []
    assert [hit.item for hit in questions.find(around(OTHERS[1][1]))] == ["river"]


def test_a_hash_that_two_ngrams_share_makes_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def hash_badly(text_words: list[bytes]) -> Any:
        return np.ones(len(text_words), dtype=np.uint64)

    monkeypatch.setattr("recipes.prepare.contamination.hash_words", hash_badly)
    questions = make(("farm", QUESTION), ("river", OTHERS[1][1]))
    assert questions.find(" ".join(topics["with"].split())) == []
    assert [hit.item for hit in questions.find(QUESTION)] == ["farm"]


def test_repeated_words_are_covered_once() -> None:
    item = "ha " * 40
    assert make(("laugh", item)).find(around("ha " * 13)) == [Hit("laugh", 1.0, item.strip())]


def test_evidence_has_at_most_200_characters() -> None:
    item = topics["with"]
    hit = make(("with", item)).find(item)[0]
    assert hit.coverage == 1.0
    assert len(hit.evidence) == 200
    assert hit.evidence in item


@pytest.mark.parametrize("seed", range(20))
def test_a_passage_has_its_words_whatever_the_characters(seed: int) -> None:
    rng = np.random.default_rng(seed)
    alphabet = list("ab1Σς'-. \n\t\x85\u2028\u00ad\u0301éÉİ日のกิ한½\ud800🙂٣")
    text = "".join(rng.choice(alphabet, size=120))
    found = split_words(text)
    for start, stop in ((0, 1), (0, len(found)), (3, 9), (len(found) - 1, len(found))):
        passage = split_words(_passage(text, start, stop))
        assert b" ".join(found[start:stop]) in b" ".join(passage)


def test_a_set_without_items_finds_nothing() -> None:
    questions = make()
    assert (questions.num_items, questions.find(QUESTION)) == (0, [])
    assert make(("farm", QUESTION)).find("") == []


def test_a_pickled_set_finds_the_same_in_40_bytes_a_word() -> None:
    items = [(name, text) for name, text in sorted(topics.items())]
    questions = make(*items)
    data = pickle.dumps(questions)
    assert len(data) < 40 * sum(len(split_words(text)) for _, text in items)
    assert pickle.loads(data).find(topics["with"]) == questions.find(topics["with"])


@pytest.mark.parametrize(
    ("build", "setting"),
    [
        (lambda: make(min_coverage=0.0), "min_coverage=0.0"),
        (lambda: make(min_coverage=1.5), "min_coverage=1.5"),
        (lambda: make(max_item_share=0.0), "max_item_share=0.0"),
        (lambda: make(num_words=5), "min_words=8"),
        (lambda: make(min_words=0), "min_words=0"),
        (lambda: make(("farm", QUESTION), ("farm", OTHERS[0][1])), "item farm"),
    ],
)
def test_a_setting_that_cannot_work_is_an_error(build: Callable[[], EvaluationSet], setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        build()
