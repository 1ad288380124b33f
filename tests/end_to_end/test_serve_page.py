"""The served page in a real browser: what it shows, what it requests, and what it never does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.support.browser import missing, prefer, resize, wait
from tests.support.finetuned import image_processor, vit
from tests.support.pictures import encoded, picture
from tests.support.serving import served
from tests.support.stored import tiny_bank

import lamina
from lamina.bank import Reader, ReaderBank
from lamina.bank.layer_amounts import layer_amounts
from lamina.fusion.pooled_layers import PooledLayers
from lamina.fusion.scalar_mix import ScalarMix
from lamina.heads.sequence_classification import ImageClassification, SequenceClassification

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
TEXT = "🎬 anna went to paris ."
GOLDEN = Path(__file__).parents[1] / "golden" / "files"
EVIL = "<img src=x onerror=\"document.title='gone'\"> is a film"


@pytest.fixture(scope="module")
def bank() -> ReaderBank:
    bank = tiny_bank()
    topics = bank.add("topics", Reader(PooledLayers(8), SequenceClassification(("war", "art"), pooling="first")))
    topics.info["pair"] = True
    return bank.eval()


@pytest.fixture
def page(browser: Any, address: str) -> Any:
    """Open the page as on a first visit, and return the browser."""
    browser.get(address)
    browser.execute_script("localStorage.clear(); sessionStorage.clear()")
    browser.get("about:blank")
    for log in ("performance", "browser"):
        browser.get_log(log)
    prefer(browser, "light")
    resize(browser, 1280, 900)
    browser.get(address)
    wait(lambda: browser.find_element("id", "ask").is_displayed())
    return browser


def ask(page: Any, text: str) -> None:
    box = page.find_element("id", "text")
    page.execute_script("arguments[0].value = arguments[1]", box, text)  # the driver types no emoji
    page.find_element("css selector", "#ask button.main").click()


def is_answered(page: Any) -> bool:
    busy = page.find_element("id", "answers").get_attribute("aria-busy")
    return busy == "false" and bool(page.find_elements("css selector", ".layers"))


def texts(page: Any, selector: str) -> list[str]:
    return page.execute_script("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)


def problem(page: Any) -> str:
    return page.find_element("id", "problem").text


def requests(page: Any) -> list[str]:
    """Return the addresses that the browser has requested since this was last called."""
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    sent = (event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent")
    return [url for url in sent if not url.startswith(("data:", "about:"))]


@pytest.mark.long
def test_a_text_is_answered_by_all_tasks_with_layers_and_tokens(page: Any, bank: ReaderBank, address: str):
    (said,) = lamina.predict(bank, [TEXT])
    ask(page, TEXT)
    wait(lambda: is_answered(page))
    assert texts(page, ".task h2") == ["mood", "who", "topics"]
    shown = dict(zip(*[iter(texts(page, "[data-task=mood] .answer .bars > :not(.track)"))] * 2, strict=True))
    assert shown == {label: f"{100 * p:.1f} %" for label, p in said["mood"]["probabilities"].items()}
    assert said["who"], "the text of this test must have an entity"
    marks = texts(page, "[data-task=who] mark")
    assert marks == [f"{span['text']}{span['label']} {100 * span['score']:.1f} %" for span in said["who"]]
    assert (
        page.execute_script("return document.querySelector('[data-task=who] .said').firstChild.textContent")
        == (TEXT[: said["who"][0]["start"]])
    )
    layers = texts(page, "[data-task=mood] .layers .bars > .label")
    assert layers == ["3", "2", "1"]
    assert texts(page, "[data-task=topics] .heat th[scope=col]") == (
        ["[CLS]", "[UNK]", "anna", "went", "to", "paris", ".", "[SEP]"]
    )
    assert texts(page, "[data-task=topics] .heat tbody th") == ["3", "2", "1", "0"]
    assert texts(page, "[data-task=topics] .shaded span") == texts(page, "[data-task=topics] .heat th[scope=col]")
    cells = "[...document.querySelectorAll('[data-task=topics] td[title]')]"
    shades = f"return {cells}.map(e => +e.style.getPropertyValue('--share'))"
    rows = layer_amounts(bank, ["topics"], bank.processor(TEXT, return_tensors="pt"))["topics"]
    assert rows is not None
    assert page.execute_script(shades) == pytest.approx((rows / rows.max()).flip(0).flatten().tolist(), abs=1e-3)
    timing = page.find_element("id", "timing")
    assert timing.text == "Details"
    timing.find_element("css selector", "summary").click()
    assert timing.text.startswith("Details\nOne pass over this text: ")
    assert page.get_log("browser") == []
    sent = requests(page)
    assert {url.removeprefix(address) for url in sent} == {"/", "/info", "/predict", "/explain"}


@pytest.mark.long
def test_layer_importances_have_a_scale_from_zero_with_a_mark_at_equal_shares(page: Any, bank: ReaderBank):
    ask(page, TEXT)
    wait(lambda: is_answered(page))
    layers = "[data-task=mood] .layers"
    shares = [*bank["mood"].importance().values()][::-1]
    zero, end = texts(page, f"{layers} .axis span")
    assert zero == "0"
    full = float(end.removesuffix(" %")) / 100
    assert max(shares) < full < 1
    for box, name, expected in ((".track i", "--share", shares), (".track", "--mark", [1 / 3] * 3)):
        script = "return [...document.querySelectorAll(arguments[0])].map(e => +e.style.getPropertyValue(arguments[1]))"
        drawn = page.execute_script(script, f"{layers} {box}", name)
        assert drawn == pytest.approx([share / full for share in expected], abs=1e-4)
    width = "return arguments[0].getBoundingClientRect().width"
    track, filled = (page.find_element("css selector", f"{layers} {part}") for part in (".track", ".track i"))
    assert page.execute_script(width, filled) / page.execute_script(width, track) == pytest.approx(
        shares[0] / full, abs=0.01
    )
    assert texts(page, f"{layers} .legend") == ["1/3 = 33.3 %: every layer's share if all counted the same."]


@pytest.mark.long
def test_labels_and_examples_are_shown_before_the_first_question(page: Any, bank: ReaderBank):
    assert texts(page, ".reader h2") == ["mood", "who", "topics"]
    assert texts(page, ".reader:nth-child(3) .chips li") == ["war", "art"]
    spans = [label[2:] for label in bank["who"].config.head.labels if label != "O"]
    assert texts(page, ".reader:nth-child(2) .chips li") == [*dict.fromkeys(spans)]
    assert not page.find_element("id", "timing").is_displayed()
    examples = page.find_elements("css selector", "#examples button")
    assert [button.text for button in examples][-1] == "A man is playing a guitar. / Somebody makes music."
    assert len(examples) == 3
    examples[0].click()
    wait(lambda: is_answered(page))
    assert page.find_element("id", "text").get_attribute("value") == examples[0].text
    assert not page.find_element("id", "readers").is_displayed()
    assert texts(page, "[data-task=topics] .answer .quiet") == ["Trained on pairs of texts; this is a single text."]
    examples[2].click()
    wait(lambda: is_answered(page) and not texts(page, "[data-task=topics] .answer .quiet"))
    assert page.find_element("id", "second").get_attribute("value") == "Somebody makes music."


@pytest.mark.long
def test_a_bank_of_single_texts_has_no_second_box_and_a_title_and_examples_can_be_set(browser: Any):
    bank = tiny_bank().eval()
    for name in bank:
        bank[name].info["pair"] = False
    with served(bank, title="Film <b>moods</b>", examples=["bad film ."]) as address:
        browser.get(address)
        wait(lambda: browser.find_element("id", "ask").is_displayed())
        assert browser.title == browser.find_element("id", "name").text == "Film <b>moods</b>"
        assert not browser.find_element("id", "pair").is_displayed()
        assert texts(browser, "#examples button") == ["bad film ."]
        browser.get(f"{address}/#{urlencode({'text': 'good', 'second': 'bad'})}")  # what is asked is never hidden
        wait(lambda: browser.find_element("id", "second").is_displayed() and is_answered(browser))
        assert browser.get_log("browser") == []


@pytest.mark.long
def test_a_link_restores_text_and_answers(page: Any, address: str):
    ask(page, TEXT)
    wait(lambda: is_answered(page))
    link, marks = page.current_url, texts(page, "mark")
    assert link == f"{address}/#{urlencode({'text': TEXT})}"
    page.get("about:blank")
    page.get_log("performance")
    page.get(link)
    wait(lambda: is_answered(page))
    assert page.find_element("id", "text").get_attribute("value") == TEXT
    assert texts(page, "mark") == marks
    assert not any("paris" in url for url in requests(page) if not url.startswith(f"{address}/#"))
    page.execute_script("location.hash = arguments[0]", urlencode({"text": "bad", "second": "good"}))
    wait(lambda: page.find_element("id", "second").get_attribute("value") == "good" and is_answered(page))
    assert page.find_element("id", "second").is_displayed()
    assert texts(page, ".answer .quiet") == []


@pytest.mark.long
def test_a_task_of_pairs_has_a_note_beside_the_answer_about_a_single_text(page: Any):
    ask(page, TEXT)
    wait(lambda: is_answered(page))
    assert texts(page, "[data-task=topics] .answer .quiet") == ["Trained on pairs of texts; this is a single text."]
    assert texts(page, "[data-task=mood] .answer .quiet") == []


@pytest.mark.long
def test_errors_are_shown_in_words(page: Any):
    ask(page, "  ")
    assert problem(page) == "Type a text first."
    ask(page, "film " * 40)
    wait(lambda: problem(page).startswith("The text has 42 tokens; at most 32 are read. Tick the box"))
    assert not page.find_elements("css selector", ".task")
    page.find_element("id", "truncate").click()
    page.find_element("css selector", "#ask button.main").click()
    wait(lambda: is_answered(page))
    assert problem(page) == ""


@pytest.mark.long
def test_a_text_is_never_used_as_markup(page: Any):
    ask(page, EVIL)
    wait(lambda: is_answered(page))
    assert page.title == "tiny on bert"
    assert page.find_elements("css selector", "main img") == []
    script = "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s)"
    page.execute_script(script)
    assert page.title == "tiny on bert"
    assert [entry for entry in page.get_log("browser") if "Content Security Policy" in entry["message"]]


@pytest.mark.long
def test_a_server_with_a_key_shows_nothing_without_it(browser: Any, bank: ReaderBank):
    with served(bank, api_key="s3cret") as address:
        browser.get(f"{address}/#{urlencode({'text': TEXT})}")
        wait(lambda: browser.find_element("id", "unlock").is_displayed())
        assert not browser.find_element("id", "ask").is_displayed()
        assert "mood" not in browser.page_source
        for key, then in (
            ("wrong", lambda: problem(browser) == "The key is missing or wrong."),
            ("s3cret", is_answered),
        ):
            browser.find_element("id", "key").send_keys(key)
            browser.find_element("css selector", "#unlock button").click()
            wait(lambda then=then: then(browser) if then is is_answered else then())
        assert problem(browser) == ""
        assert "s3cret" not in browser.current_url
        assert browser.execute_script("return Object.keys(localStorage).length") == 0


@pytest.mark.long
def test_dark_theme_and_the_width_of_a_phone(page: Any):
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.execute_script(colour)
    ask(page, TEXT)
    wait(lambda: is_answered(page))
    tag = "return getComputedStyle(document.querySelector('mark')).backgroundColor"
    pale = page.execute_script(tag)
    prefer(page, "dark")
    assert page.execute_script(colour) != light
    assert page.execute_script(tag) != pale
    assert page.find_element("id", "theme").get_attribute("aria-pressed") == "true"
    page.find_element("id", "theme").click()
    assert (page.execute_script(colour), page.execute_script(tag)) == (light, pale)
    resize(page, 360, 800)
    assert page.execute_script("return document.documentElement.scrollWidth") == 360
    boxes = page.execute_script(
        "return [...document.querySelectorAll('.task')].map(e => e.scrollWidth - e.clientWidth)"
    )
    assert boxes == [0, 0, 0]


@pytest.mark.long
def test_a_grid_of_tokens_that_scrolls_fades_at_its_edge(page: Any):
    resize(page, 360, 800)
    ask(page, " ".join([TEXT] * 4))
    wait(lambda: is_answered(page))
    box = page.find_element("css selector", ".heat")
    assert page.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", box)
    fade = "return parseFloat(getComputedStyle(arguments[0]).getPropertyValue('--fade'))"
    wait(lambda: page.execute_script(fade, box) == 40)  # a timeline of scrolling is looked at once a frame
    page.execute_script("arguments[0].scrollLeft = arguments[0].scrollWidth", box)
    wait(lambda: page.execute_script(fade, box) == 0)
    page.execute_script("arguments[0].scrollLeft = 0", box)
    wait(lambda: page.execute_script(fade, box) == 40)
    cells = "arguments[0].querySelectorAll('th[scope=col], tbody td').forEach((cell) => cell.remove())"
    page.execute_script(cells, box)
    wait(lambda: page.execute_script(fade, box) == 0)


@pytest.mark.long
def test_an_image_is_shown_and_answered(browser: Any, tmp_path: Path):
    bank = ReaderBank(vit(), image_processor())
    bank.add("animal", Reader(ScalarMix(), ImageClassification(("bird", "cat", "frog"))))
    shot, other = tmp_path / "shot.png", tmp_path / "note.txt"
    shot.write_bytes(encoded(picture(90)))
    other.write_text("no image")
    (said,) = lamina.predict(bank.eval(), [shot.read_bytes()])
    with served(bank) as address:
        browser.get(address)
        wait(lambda: browser.find_element("id", "file").is_displayed())
        assert not browser.find_element("id", "text").is_displayed()
        assert not browser.find_element("id", "link").is_displayed()
        browser.find_element("id", "file").send_keys(str(other))
        wait(lambda: problem(browser) == "note.txt cannot be read here. This bank reads files of type image.")
        browser.find_element("id", "file").send_keys(str(shot))
        wait(lambda: is_answered(browser))
        shown = texts(browser, ".answer .bars > .number")
        assert shown == [f"{100 * p:.1f} %" for p in sorted(said["animal"]["probabilities"].values(), reverse=True)]
        assert texts(browser, ".layers .bars > .label") == ["2", "1", "0, embeddings"]
        assert browser.execute_script("return document.querySelector('#preview img').naturalWidth") == 12
        assert browser.get_log("browser") == []


@pytest.mark.long
def test_numbers_several_labels_and_masked_words_are_shown(browser: Any):
    model, tokenizer = lamina.load(GOLDEN / "base")
    bank = ReaderBank.from_pretrained(GOLDEN / "bank", model, tokenizer)
    text = "anna is [MASK] in paris"
    (said,) = lamina.predict(bank, [text], readers=["stars", "topics", "word"])
    with served(bank) as address:
        browser.get(f"{address}/#{urlencode({'text': text})}")
        wait(lambda: is_answered(browser))
        assert float(texts(browser, "[data-task=stars] .value")[0]) == pytest.approx(said["stars"]["value"], rel=1e-3)
        likely = {label for label, p in said["topics"]["probabilities"].items() if p >= 0.5}
        assert set(texts(browser, "[data-task=topics] .answer .first:not(.number)")) == likely
        words = ", ".join(one["token"] for one in said["word"][0]["candidates"])
        assert texts(browser, "[data-task=word] mark") == [f"[MASK]{words}"]
        assert browser.get_log("browser") == []
