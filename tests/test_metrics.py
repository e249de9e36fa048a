"""The SQuAD v1.1 metrics and the number extraction; every expectation was worked out by hand."""

import eval_niah
import pytest

CASES = [  # prediction, golds, EM, F1
    ("Paris", ["Paris"], 1, 1),
    ("paris.", ["Paris"], 1, 1),
    ("The Paris", ["Paris"], 1, 1),
    ("in Paris", ["Paris"], 0, 2 / 3),
    ("a cat sat", ["the cat"], 0, 2 / 3),
    ("red blue green", ["green blue red"], 0, 1),
    ("one two three four", ["two four six"], 0, 4 / 7),
    ("3 apples", ["the 3 apples a day"], 0, 4 / 5),
    # repeated tokens count as often as both have them
    ("the cat the cat", ["cat"], 0, 2 / 3),
    ("cat cat dog", ["cat dog dog"], 0, 2 / 3),
    ("dog dog dog dog", ["dog"], 0, 2 / 5),
    ("dog dog", ["dog dog"], 1, 1),
    # several golds: the best one
    ("New York", ["NYC", "New York City"], 0, 4 / 5),
    ("York", ["NYC", "New York", "York"], 1, 1),
    ("Rome", ["Paris", "London"], 0, 0),
    # articles go, as whole words and after the punctuation
    ("an apple", ["apple"], 1, 1),
    ("another apple", ["other apple"], 0, 1 / 2),
    ("Theatre", ["atre"], 0, 0),
    ("the-cat", ["cat"], 0, 0),
    ("A-team", ["team"], 0, 0),
    ("A-team", ["ateam"], 1, 1),
    ("the—end", ["a—end"], 1, 1),
    ("the—end", ["end"], 0, 0),
    # ASCII punctuation goes without leaving a space, no other does
    ("a.m.", ["am"], 1, 1),
    ("U.S.A.", ["USA"], 1, 1),
    ("1,000", ["1000"], 1, 1),
    ("$5", ["5"], 1, 1),
    ("€5", ["5"], 0, 0),
    ("snake_case", ["snakecase"], 1, 1),
    ("O'Neil", ["ONeil"], 1, 1),
    ("O’Neil", ["O'Neil"], 0, 0),
    ("“Paris”", ["Paris"], 0, 0),
    ("1990-1995", ["19901995"], 1, 1),
    ("1990–1995", ["1990-1995"], 0, 0),
    ("1990–1995", ["1990–1995"], 1, 1),
    ("何？", ["何"], 0, 0),
    # case and white space
    ("the  New\tYork\nTimes", ["new york times"], 1, 1),
    ("CAFÉ", ["café"], 1, 1),
    ("café", ["cafe"], 0, 0),
    ("Straße", ["STRASSE"], 0, 0),
    # nothing left: equal as strings, but no token in common
    ("", ["Paris"], 0, 0),
    ("Paris", ["???"], 0, 0),
    ("", [""], 1, 0),
    ("the", ["The"], 1, 0),
    ("", ["The"], 1, 0),
    ("?!", ["???"], 1, 0),
    ("a an the", ["dog", "-"], 1, 0),
    # whole numbers
    ("84213", ["4213"], 0, 0),
    ("4213", ["84213"], 0, 0),
    ("1,234,567", ["1234567"], 1, 1),
]


@pytest.mark.parametrize("prediction,golds,em,f1", CASES)
def test_exact_match_and_f1(prediction, golds, em, f1):
    assert eval_niah.exact_match(prediction, golds) == em
    assert eval_niah.token_f1(prediction, golds) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize("text,want", [
    ("  The  Cat's  Meow! ", "cats meow"), ("A the AN", ""), ("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", ""), ("Anna an' a. Theo", "anna theo"),
    ("x – y", "x – y"), ("a\u00a0b", "b"), ("", ""),
])
def test_normalize_answer(text, want):
    assert eval_niah.normalize_answer(text) == want


@pytest.mark.parametrize("text,want", [
    ("The number is 84213", "84213"), ("It is 4213.", "4213"), ("4213, not 84213", "4213"), ("1,234,567 people", "1,234,567"),
    ("about 3.14 or so", "3 14"), ("It weighs 4213.5.", "4213 5"), ("Answer:\n\n7654321\n", "7654321"), ("1, 2 and 3", "1"),
    ("(0042)", "0042"), ("x1234567y", "1234567"), ("#7!", "7"),
    ("I do not know.\nSorry.", "I do not know."), ("\n\nNone", "None"), ("", ""), (" \n", ""),
])
def test_first_number(text, want):
    assert eval_niah.first_number(text) == want


@pytest.mark.parametrize("text,value,em", [
    (" 7654321.", "7654321", 1), ("7,654,321", "7654321", 1), ("17654321", "7654321", 0),
    ("76543210", "7654321", 0), ("765 4321", "7654321", 0), ("76.54321", "7654321", 0),
    ("either 1111111 or 7654321", "7654321", 0), ("I cannot find it.", "7654321", 0),
])
def test_a_needle_is_found_whole_or_not_at_all(text, value, em):
    assert eval_niah.exact_match(eval_niah.first_number(text), [value]) == em
