"""Rank fusion against a naive loop, lexical credit, and the retriever on real passages."""

import cognito_run as core
import numpy as np
import pytest
from rank_bm25 import BM25Okapi


class StubEmbedder:
    """Unit vectors of one's own choice: a function from texts to (n, D). Remembers what it was given, and as what."""

    def __init__(self, vectors):
        self.vectors = vectors
        self.texts = []

    def encode(self, texts, prompt_name, normalize_embeddings, show_progress_bar):
        assert normalize_embeddings and not show_progress_bar
        self.texts += [(prompt_name, text) for text in texts]
        vectors = np.asarray(self.vectors(texts), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def indifferent():
    """All passages are equally near to any question."""
    return StubEmbedder(lambda texts: np.ones((len(texts), 4)))


def rank(passages, question, embedder, reranker=None):
    return core.HybridRetriever(passages, embedder, reranker).rank(question)


@pytest.mark.parametrize("scores,want", [
    ([3.0, 1.0, 2.0], [1, 3, 2]), ([5, 5, 5], [1, 1, 1]), ([1, 7, 7, 0], [3, 1, 1, 4]),
    ([-np.inf, 0.0, -np.inf], [2, 1, 2]), ([4], [1]), ([], []),
])
def test_shared_ranks(scores, want):
    assert core.shared_ranks(scores).tolist() == want


def naive_fusion(rankings, k):
    n = len(rankings[0][0])
    total = [0.0] * n
    for scores, credit in rankings:
        for i in range(n):
            if credit[i]:
                better = [j for j in range(n) if credit[j] and scores[j] > scores[i]]
                total[i] += 1 / (k + len(better) + 1)
    return total


@pytest.mark.parametrize("k", [60, 1])
def test_fusion_equals_a_naive_loop(k):
    rng = np.random.default_rng(0)
    for _ in range(50):
        n = int(rng.integers(1, 12))
        rankings = [(rng.integers(-3, 4, n).astype(float), rng.random(n) < 0.7) for _ in range(3)]
        assert core.reciprocal_rank_fusion(rankings, k).tolist() == pytest.approx(naive_fusion(rankings, k), abs=1e-15)


def test_fusion_constant():
    everywhere = np.array([True, True])
    got = core.reciprocal_rank_fusion([(np.array([2.0, 1.0]), everywhere), (np.array([9.0, 1.0]), everywhere)])
    assert got.tolist() == pytest.approx([2 / 61, 2 / 62])


@pytest.mark.parametrize("passages,question,credited", [
    (["alpha beta", "gamma delta"], "gamma?", [False, True]),  # idf 0
    (["cat pet", "pet cat cat", "bird"], "Cat!", [True, True, False]),  # idf negative
    (["the cat", "the dog"], "bird", [False, False]),
    (["the cat", "the dog"], "?!", [False, False]),
    (["!!!", "a cat"], "cat", [False, True]),
    (["catalogue", "scatter"], "cat", [False, False]),  # a part of a word is no evidence
])
def test_no_lexical_evidence_no_lexical_credit(passages, question, credited):
    assert max(BM25Okapi([core.words(passage) for passage in passages]).get_scores(core.words(question))) <= 0
    for score, has_credit in zip(rank(passages, question, indifferent()), credited):
        assert score > 1.5 / 61 if has_credit else score == pytest.approx(1 / 61)


@pytest.mark.parametrize("text,want", [
    ("Straße, STRASSE", ["strasse", "strasse"]), ("na\u00efve nai\u0308ve", ["na\u00efve"] * 2), ("ﬁnal ﬂow", ["final", "flow"]),
    ("co\u00adop\u00aderate \ufeffco\u200boperate", ["cooperate", "cooperate"]), ("ＡＢＣ１２ x²", ["abc12", "x2"]), ("snake_case 3.14", ["snake_case", "3", "14"]),
    ("ΟΔΟΣ οδός", ["οδοσ", "οδόσ"]), ("हिन्दी में", ["हिन्दी", "में"]), ("مُحَمَّد", ["مُحَمَّد"]), ("می\u200cروم", ["میروم"]), ("한국어 말", ["한국어", "말"]),
    ("東京都に行く。", ["東京", "京都", "都に", "に行", "行く"]), ("ﾀﾜｰ", ["タワ", "ワー"]), ("茶", ["茶"]), ("GPU内存16GB", ["gpu", "内存", "16gb"]),
    ("ที่นี่", ["ที่นี่"]), ("ບ້ານ", ["ບ້າ", "ານ"]), ("ខ្មែរ", ["ខ្មែ", "មែរ"]), ("မြန်မာ", ["မြန်", "န်မာ"]), ("?! …", []), ("", []), ("👩\u200d👧 ❤\ufe0f", []),
])
def test_words(text, want):
    """Case-folded NFKC, marks kept; pairs of characters, with their marks, where a script has no spaces."""
    assert core.words(text) == want


@pytest.mark.parametrize("other,holding,question", [
    ("The garden is closed.", "The of\u00adfice opens at nine.", "Oﬃce hours?"),
    ("A bar in Paris", "A cafe\u0301 in Paris", "CAFÉ?"),
    ("会議は木曜日に開かれた。", "図書館の予算は三千万円です。", "予算はいくらですか"),
    ("面包在凌晨四点烘烤。", "岛上的灯塔建于一八七四年。", "灯塔是什么时候建的？"),
    ("ประชุมจัดขึ้นวันพฤหัสบดี", "งบประมาณของห้องสมุด", "งบประมาณเท่าไร"),
    ("សាលាបើកនៅម៉ោងប្រាំបួន", "បណ្ណាល័យបិទ", "បណ្ណាល័យនៅឯណា"),
    ("आज बैठक में", "यह किताब है", "किताब?"),
])
def test_lexical_evidence_in_other_forms_and_scripts(other, holding, question):
    scores = rank([other, holding, "!"], question, indifferent())
    assert scores.argmax() == 1 and scores[1] > 1 / 61 + 1 / 62


def test_corpus_without_words():
    assert rank(["!!!", "???"], "What is it?", indifferent()).tolist() == pytest.approx([1 / 61, 1 / 61])


PASSAGES = [
    "The lighthouse on Skarn island was built in 1874 by the engineer Ruth Halloran, and its lamp burned whale oil.",
    "Bread is baked at four in the morning; the oven is fired with beech wood, which burns slowly and evenly.",
    "The annual budget of the library is 310,000 euros, of which a third is spent on journals.",
    "Our tallest member, Piotr, plays the double bass, while his sister Hanna sings soprano in the choir.",
    "Penguins cannot fly, but they swim at up to thirty kilometres per hour when they hunt for fish.",
    "To reset the router, hold the small button at the back for ten seconds until the red light blinks.",
    "The treaty of Velm ended the war in 1653 and gave the northern provinces their own parliament.",
    "Patients with this allergy must avoid peanuts and carry an adrenaline pen at all times.",
]
QUESTIONS = [
    ("Who constructed the lighthouse?", 0), ("How much money does the library have per year?", 2), ("Which instrument does Piotr play?", 3),
    ("How do I restart my internet box?", 5), ("In which year did the war end?", 6), ("What must people with the allergy not eat?", 7),
]


@pytest.fixture(scope="module")
def minilm():
    return core.load_embedder("minilm")


@pytest.mark.parametrize("question,answer", QUESTIONS)
def test_finds_the_passage_with_the_answer(minilm, question, answer):
    scores = rank(PASSAGES, question, minilm)
    assert scores.argmax() == answer and sorted(scores)[-2] < scores[answer]


def test_real_embeddings_are_unit_vectors_without_prefix(minilm):
    retriever = core.HybridRetriever(PASSAGES, minilm)
    plain = minilm.encode(PASSAGES)
    assert np.allclose(retriever.vectors, plain / np.linalg.norm(plain, axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("seed", [0, 3, 6])
def test_dense_ranks_of_300_passages_are_exact(seed):
    """Every passage is ranked by its cosine; like a text embedder's, the vectors have a direction in common."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(1, 384)) + rng.normal(size=(301, 384))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = rank([f"text {i}" for i in range(300)], "text 300", StubEmbedder(lambda texts: vectors[[int(text[5:]) for text in texts]]))
    ranks = 1 / (scores - 1 / 61) - 60  # all share the word "text"
    want = [1 + sum(other > cosine for other in vectors[:300] @ vectors[300]) for cosine in vectors[:300] @ vectors[300]]
    assert np.abs(ranks - want).max() < 1.5  # single precision may swap two neighbours


@pytest.mark.parametrize("n,at", [(300, 150), (2000, 0)])
def test_equal_passages_hide_no_other(n, at):
    """As in a log file: a perfect match among copies of one line comes first, and the copies tie."""
    passages = ["nothing new"] * n
    passages[at] = "needle"
    near, far = np.random.default_rng(0).normal(size=(2, 384))
    scores = rank(passages, "where", StubEmbedder(lambda texts: [far if text == "nothing new" else near for text in texts]))
    assert scores[at] == pytest.approx(1 / 61)
    assert np.delete(scores, at).tolist() == pytest.approx([1 / 62] * (n - 1))


@pytest.mark.parametrize("where", ["passage", "question"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_embeddings_that_are_not_finite_raise(where, value):
    embedder = StubEmbedder(lambda texts: [[value, 1.0] if where in text else [0.0, 1.0] for text in texts])
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="not finite"):
        rank(["passage one", "passage two"], "question", embedder)


@pytest.mark.parametrize("name, prefix", [
    ("nomic-ai/nomic-embed-text-v1.5", "search_{}: "), ("minilm", ""), ("BAAI/bge-small-en", ""),
])
def test_prefixes_of_nomic(monkeypatch, name, prefix):
    """sentence-transformers puts the prompt of that name before each text; documents and questions have one each."""
    import sentence_transformers

    class Stub(StubEmbedder):
        def __init__(self, source, prompts, **kwargs):
            super().__init__(lambda texts: np.ones((len(texts), 4)))
            self.prompts = prompts

    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", Stub)
    embedder = core.load_embedder(name)
    rank(["one", "two"], "which?", embedder)
    read = [embedder.prompts[prompt_name] + text for prompt_name, text in embedder.texts]
    assert read == [prefix.format("document") + "one", prefix.format("document") + "two", prefix.format("query") + "which?"]


def test_long_passage_is_as_near_as_its_nearest_part():
    class Embedder(StubEmbedder):
        max_seq_length, prompts, tokenizer = 28, {"document": "search: "}, core.load_tokenizer("tiny")

    cosines = {"First one. ": 0.1, "Second one. ": 0.9, "Third one.": 0.3, "Fourth one. ": 0.4, "Fifth one.": 0.35, "Short.": 0.5, "query": 1.0}
    embedder = Embedder(lambda texts: [[cosines[text], np.sqrt(1 - cosines[text] ** 2)] for text in texts])
    retriever = core.DocumentRetriever(["Ｓhort.", "First one. Sec\u00adond one. Third one.", "Fourth one. Fifth one."], embedder)
    assert [text for _, text in embedder.texts] == list(cosines)[5:6] + list(cosines)[:5]
    assert retriever.rank("ｑuery").tolist() == pytest.approx([1 / 62, 1 / 61, 1 / 63])


def test_what_stands_behind_the_embedders_window_is_found(minilm):
    """MiniLM reads 256 word pieces. The evaluations leave it at that; where nothing is longer, both rank alike."""
    passages = ["A modem is a device.", "Our shop sells shoes and boots. " * 50 + PASSAGES[5], "Radio waves.", "Boxes of apples."]
    question = "How do I restart my wifi?"
    assert core.DocumentRetriever(passages, minilm).rank(question).argmax() == 1 != core.HybridRetriever(passages, minilm).rank(question).argmax()
    both = [kind(PASSAGES, minilm).rank(question).tolist() for kind in (core.DocumentRetriever, core.HybridRetriever)]
    assert both[0] == both[1]


PORTUGUESE = [
    "O farol da ilha foi construído em 1874 por uma engenheira, e a sua lâmpada queimava óleo de baleia.",
    "A assembleia elegeu um novo presidente, que devia pagar a fatura da biblioteca.",
    "Fazia calor na casa e todas as crianças brincavam no jardim até ao fim da tarde.",
]
RUSSIAN, JAPANESE, HINDI = "Кто построил маяк на острове?", "島の灯台は誰が建てたのですか", "द्वीप पर प्रकाशस्तंभ किसने बनाया था"


@pytest.mark.parametrize("passages,questions,english,said", [
    (PASSAGES, ["Who built it?", "Skarn?", "Who?", "Halloran, Ruth"], True, []),
    (["for i, row in enumerate(rows):\n    total += row[0] * width[i]\n", "| 1874 | 0x3f | a3b9 |", "def __init__(self, args):"], ["1 2 3"], True, []),
    (PASSAGES + PORTUGUESE[:2], ["Who built the lighthouse?"], True, []),
    (PORTUGUESE, ["Quem construiu o farol da ilha?", RUSSIAN], True, ["3 of 3 passages"]),
    (PASSAGES[:4] + PORTUGUESE, ["Who built the lighthouse?"], True, ["3 of 7 passages"]),
    (PASSAGES, ["Who built it?", RUSSIAN, JAPANESE], True, ["the question"]),
    (PASSAGES, [JAPANESE], True, ["the question"]), (PASSAGES, [HINDI], True, ["the question"]),
    (PORTUGUESE, [RUSSIAN, JAPANESE], False, []),
])
def test_language_that_the_embedder_does_not_know_is_said_once(minilm, caplog, passages, questions, english, said):
    retriever = core.DocumentRetriever(passages, minilm, english=english)
    for question in questions:
        assert len(retriever.rank(question)) == len(passages)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == len(said) and all(what in message and "--embedder" in message for what, message in zip(said, messages))


def test_cross_encoder_is_a_third_ranking():
    class Reranker:
        def predict(self, pairs, show_progress_bar):
            assert pairs == [("cat?", "cat"), ("cat?", "dog"), ("cat?", "bird")]
            return np.array([-3.0, -2.0, 8.0])

    passages = ["cat", "dog", "bird"]
    assert rank(passages, "cat?", indifferent()).tolist() == pytest.approx([2 / 61, 1 / 61, 1 / 61])
    assert rank(passages, "cat?", indifferent(), Reranker()).tolist() == pytest.approx([2 / 61 + 1 / 63, 1 / 61 + 1 / 62, 2 / 61])
    assert rank(passages[1:], "cat?", indifferent(), type("R", (), {"predict": lambda *a, **k: [1.0, 2.0]})()).argmax() == 1
