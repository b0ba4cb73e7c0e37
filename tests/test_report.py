"""The page: whole, self-contained, well-formed, honest about what is missing, and safe whatever the names are."""

import html.parser
import re

import pytest

from analysis import records, report
from analysis.records import RecordError
from tests.recorded import write_run, write_verification

VOID = {"meta", "img", "br", "hr", "link"}
FIGURES = (
    "figure_1_trajectories",
    "figure_2_identity",
    "figure_3_sharpening",
    "figure_4_theta_p_max",
    "figure_5_depth",
    "figure_5b_products",
)


class Page(html.parser.HTMLParser):
    """Tags in order (balanced, or it fails), attributes and text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open
        self.text = re.sub(r"\s+", " ", "".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


def page(path):
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A finished, probed, checked experiment and its page."""
    out = tmp_path_factory.mktemp("complete")
    paths = [write_run(out / f"{p}-{s}", p, s, probe=True) for p in ("pre", "post") for s in (1, 2)]
    write_verification(out / "verify.json")
    runs = records.read_runs(paths)
    return runs, report.write_report(out, runs, unigram_entropy=3.1, command="sens reproduce --out here")


def test_complete_page(complete):
    _, written = complete
    assert written.name == "report.html"
    assert written.stat().st_size < 5_000_000
    read = page(written)
    titles = [
        "What was asked",
        "The identity",
        "Training",
        "Sharpening against bisectability",
        "Through depth",
        "Where ours differs from the paper",
        "Configuration and versions",
        "How to reproduce",
    ]
    places = [read.text.index(title) for title in titles]
    assert places == sorted(places)
    assert "What is missing" not in read.text
    assert "6.771 ± 1.551" in read.text
    assert "sens reproduce --out here" in read.text
    assert "packages.jax" in read.text
    assert read.tags.count("img") == len(FIGURES)
    for name in FIGURES:
        assert (written.parent / "figures" / f"{name}.png").is_file()
        assert (written.parent / "figures" / f"{name}.svg").is_file()


def test_page_needs_nothing_from_outside(complete):
    _, written = complete
    read = page(written)
    assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & set(read.tags)
    assert all(source.startswith("data:image/") for source in read.sources)
    assert not re.search(r"url\(|@import", written.read_text(encoding="utf-8"))
    assert "prefers-color-scheme: dark" in written.read_text(encoding="utf-8")


def test_same_records_same_bytes(complete, tmp_path):
    runs, written = complete
    again = report.write_report(
        tmp_path,
        runs,
        verification=written.parent / "verify.json",
        unigram_entropy=3.1,
        command="sens reproduce --out here",
    )
    assert again.read_bytes() == written.read_bytes()


def test_names_are_escaped(tmp_path):
    attack = "<img src=x onerror=alert(1)>&\"'"
    run = records.read_run(write_run(tmp_path / "<b>run", updates=12))
    run.config["train"]["source"] = run.config["train"]["</td><script>"] = attack
    records.write_json(run.path / "versions.json", {attack: "<script>alert(2)</script>"})
    written = report.write_report(tmp_path / "out", [run], command=attack)
    read = page(written)
    assert not {"script", "b"} & set(read.tags)
    assert read.sources == [source for source in read.sources if source.startswith("data:image/")]
    assert read.text.count(attack) >= 3
    assert "<script>alert(2)</script>" in read.text


def test_nothing_yet(tmp_path):
    read = page(report.write_report(tmp_path / "out", []))
    assert "No run has been recorded." in read.text
    assert "The identity check has not been run" in read.text
    assert "img" not in read.tags


def test_one_fresh_run(tmp_path):
    """A run that has a configuration and nothing else yet."""
    path = write_run(tmp_path / "run", updates=1)
    for table in records.TABLES:
        (path / f"{table}.jsonl").unlink(missing_ok=True)
    read = page(report.write_report(tmp_path, [records.read_run(path)]))
    assert "pre-LN, seed 42: no update is recorded yet." in read.text
    assert "model.n_layer" in read.text


def test_unfinished_single_run(tmp_path):
    path = write_run(tmp_path / "run", updates=12, planned=60)
    read = page(report.write_report(tmp_path, [records.read_run(path)]))
    assert "unfinished, 12 of 60 updates" in read.text
    assert "pre-LN: a single seed: no ± over seeds." in read.text
    assert "post-LN: no run." in read.text
    assert f"has not been probed (sens probe {path})" in read.text
    assert "Some runs are unfinished" in read.text
    assert read.tags.count("img") == 2


def test_without_attention_or_versions(tmp_path):
    path = write_run(tmp_path / "run", updates=12)
    for name in ("attention.jsonl", "versions.json"):
        (path / name).unlink()
    read = page(report.write_report(tmp_path, [records.read_run(path)]))
    assert "no attention statistics are recorded" in read.text
    assert "No run says what it ran on" in read.text


def test_probe_of_an_older_checkpoint_is_said(tmp_path):
    path = write_run(tmp_path / "run", updates=12, probe=True)
    row = {"update": 13, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 1, "skipped": 0}
    records.append(path, "updates", [row])
    read = page(report.write_report(tmp_path, [records.read_run(path)]))
    for what in ("attention rows", "sublayers"):
        assert f"pre-LN, seed 42: its {what} are those of update 12, though it has reached 13." in read.text


def test_failed_identity_is_not_hidden(tmp_path):
    path = write_verification(tmp_path / "verify.json")
    path.write_text(path.read_text().replace('"tolerance": 1e-13', '"tolerance": 1e-17'))
    assert "The identity DOES NOT HOLD within 1e-17" in page(report.write_report(tmp_path, [])).text


def test_mixture_is_refused_before_anything_is_written(complete, tmp_path):
    deeper = records.read_run(write_run(tmp_path / "deeper", seed=9, n_layer=6))
    runs, _ = complete
    with pytest.raises(RecordError, match="more than the seed differs"):
        report.write_report(tmp_path / "out", [*runs, deeper])
    assert not (tmp_path / "out").exists()


def test_damaged_versions_are_named(tmp_path):
    path = write_run(tmp_path / "run", updates=12)
    (path / "versions.json").write_text("{")
    with pytest.raises(RecordError, match=r"versions\.json: not JSON"):
        report.write_report(tmp_path, [records.read_run(path)])
