"""The report page: what it shows, and what it does with runs that are not whole."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import Recipe

from edgc_ddp.report.__main__ import main
from edgc_ddp.report.compare import labels
from edgc_ddp.report.drawing import MOST_STAGES
from edgc_ddp.report.heatmap import MOST_MATRICES, draw_heatmap, rank_table
from edgc_ddp.report.load import Run, load_run
from edgc_ddp.report.plots import window_savings
from edgc_ddp.report.stage_table import HEADS
from edgc_ddp.report.stages import draw_stages
from edgc_ddp.report.words import in_bytes, key_figures, path_words, sentence

PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """What a browser would load, and the words it would show."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.alts: list[str] = []
        self.text = ""
        self.cells: list[list[str]] = []
        self.in_cell = False
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        self.alts += [value or "" for name, value in attrs if name == "alt"]
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th") and self.cells:
            self.cells[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.in_cell:
            self.cells[-1][-1] += data

    def row(self, head: str) -> list[str]:
        return next(cells for cells in self.cells if cells and cells[0] == head)[1:]


def report(folder: Path) -> Page:
    assert main([str(folder)]) == 0
    return Page(folder / "report" / "index.html")


def cut_off(folder: Path, characters: int) -> None:
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text()[:-characters])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    folder = Recipe(calibration=(2, 4, 8)).write(tmp_path_factory.mktemp("whole") / "run")
    return folder, report(folder)


def test_page_needs_nothing_from_outside(whole: tuple[Path, Page]) -> None:
    _, page = whole
    assert page.sources and all(s.startswith("data:image/png;base64,") for s in page.sources)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert not re.search(r"https?://|@import|url\(", page.html)
    assert "prefers-color-scheme: dark" in page.html


def test_every_picture_is_in_the_page_and_beside_it(whole: tuple[Path, Page]) -> None:
    folder, page = whole
    names = {"loss", "entropy", "rank", "ranks", "bytes", "residual", "span"}
    files = {path.stem: path.read_bytes() for path in (folder / "report").glob("*.png")}
    inlined = [base64.b64decode(source.partition(",")[2]) for source in page.sources]
    assert set(files) == names
    assert sorted(inlined) == sorted(files.values())
    assert all(data.startswith(PNG) for data in inlined)
    assert len(page.alts) == len(names) and all(len(alt) > 20 for alt in page.alts)


def test_sentence_tells_the_run(whole: tuple[Path, Page]) -> None:
    folder, page = whole
    run = load_run(folder)
    ratio = run.total("dense_bytes") / run.total("wire_bytes")
    start = page.text.index("The run finished")
    sentence = page.text[start : page.text.index(".\n", start)]
    assert sentence.startswith(
        "The run finished 400 steps in 4 min 12 s, with a validation loss of"
    )
    assert "1.5678" in sentence
    assert f"{ratio:.2f} times fewer bytes" in sentence
    assert "each rank sent" in sentence
    assert sentence.endswith("the mean rank went 32 → 8, trials left out")


def test_tables_show_settings_results_and_decisions(whole: tuple[Path, Page]) -> None:
    folder, page = whole
    assert page.row("r_max") == ["32"]
    assert page.row("world_size") == ["2"]
    assert page.row("mean rank while compressing, trials included") == ["17.2"]
    assert page.row("final plan") == ["feedc0de00000000"]
    decisions = load_run(folder).decisions
    log = [cells for cells in page.cells if len(cells) == 5 and cells[0] != "step"]
    assert len(log) == len(decisions)
    assert log[0][:2] == ["2", "warm-up (dense)"] and log[0][3] == "dense"
    last = decisions[-1]
    assert log[-1] == ["395", "compression", f"{last['entropy']:.2f}", "8", last["reason"]]


LATER = (("calibration", 2), ("compress", 16), ("compress", 20), ("dense", 0))


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    folder = Recipe(later=LATER).write(tmp_path_factory.mktemp("staged") / "run")
    return folder, report(folder)


def test_a_pipelines_bytes_are_said_to_be_a_replicas(staged: tuple[Path, Page]) -> None:
    folder, page = staged
    summary = load_run(folder).summary or {}
    whole = in_bytes(summary["wire_bytes"])
    first, second = (in_bytes(stage["wire_bytes"]) for stage in summary["stages"])
    assert f"one replica (2 stages) sent {whole} instead of" in page.text
    assert f"(a rank of stage 0 {first}, of stage 1 {second})" in page.text
    assert page.row("bytes sent per replica (all its stages)") == [whole]
    assert "each rank sent" not in page.text and "one rank sent" not in page.text
    assert any("one replica, all its stages together, sent" in alt for alt in page.alts)


def test_a_pipelines_ranks_are_told_by_stage(staged: tuple[Path, Page]) -> None:
    _, page = staged
    assert "on stage 0 the mean rank went 32 → 8; on stage 1" in page.text
    assert "on stage 1 the mean rank went 16 → 20 → dense, trials left out." in page.text
    assert page.row("rank path") == ["stage 0: 32 → 8; stage 1: 16 → 20 → dense"]
    ends = [cells for cells in page.cells if len(cells) == len(HEADS) and cells[0] in "01"]
    assert [cells[1:5] for cells in ends] == [
        ["8", "compression", "32 → 8", "16.0"],
        ["dense", "dense", "16 → 20 → dense", "dense"],
    ]
    assert [cells[7:] for cells in ends] == [
        ["1.00", "20.0", "30.0", "<stage 0 at 8>"],
        ["1.00", "20.0", "30.0", "<stage 1 at 0>"],
    ]


def test_the_decisions_of_all_stages_are_in_order(staged: tuple[Path, Page]) -> None:
    folder, page = staged
    run = load_run(folder)
    log = [cells for cells in page.cells if len(cells) == 6 and cells[0] != "stage"]
    assert len(log) == len(run.decisions) + len(LATER)
    assert [int(cells[1]) for cells in log] == sorted(int(cells[1]) for cells in log)
    assert [cells[5] for cells in log if cells[0] == "1"] == [
        f"<stage 1 at {rank}>" for _, rank in LATER
    ]
    assert {"ranks", "ranks-stage1", "stages"} <= {p.stem for p in folder.glob("report/*.png")}
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", page.html)
    assert {"Gradient entropy, stage 0", "Rank by parameter, stage 1", "Rank"} <= set(titles)


def test_stages_that_went_alike_are_told_once() -> None:
    alike = ({"step": 2, "phase": "fixed", "ranks": {"a": 8}},)
    run = Run(Path("r"), decisions=alike, later_stages=(alike, alike))
    assert sentence(run).endswith("on all stages the mean rank stayed at 8 while compressing.")


def test_a_killed_pipeline_is_still_told_as_one(tmp_path: Path) -> None:
    recipe = Recipe(steps=100, warmup=20, summary=False, later=(("dense", 0),))
    page = report(recipe.write(tmp_path / "run"))
    assert "one replica (2 stages) sent" in page.text and "a rank of stage" not in page.text
    assert "on stage 1 nothing was compressed" in page.text
    assert "Stage 1: No decision compressed a matrix" in page.text


def test_a_pipeline_is_compared_by_replica(
    staged: tuple[Path, Page], three: list[Path], tmp_path: Path
) -> None:
    assert main(["compare", str(staged[0]), str(three[0]), "--out", str(tmp_path)]) == 0
    page = Page(tmp_path / "index.html")
    assert any("A replica is one rank, or all stages of a pipeline" in alt for alt in page.alts)
    assert page.row("bytes sent per rank")[0] == "–"


def test_phases_cover_the_run_without_gaps(whole: tuple[Path, Page]) -> None:
    spans = load_run(whole[0]).phases
    assert [span.phase for span in spans] == ["start", "warmup", "calibration", "compress"]
    assert (spans[0].first, spans[-1].last) == (0, 399)
    assert all(a.last == b.first for a, b in zip(spans, spans[1:], strict=False))


def test_savings_belong_to_their_own_window() -> None:
    rows = [{"step": k, "dense_bytes": 12 * (k + 1)} for k in range(8)]
    for row, sent in zip(rows, [12, 24, 27, 30, 32, 34, 36, 38], strict=True):
        row["wire_bytes"] = sent
    phases = [(0, "warmup"), (2, "compress"), (4, "calibration"), (6, "compress")]
    decisions = tuple({"step": step, "phase": phase} for step, phase in phases)
    run = Run(Path("r"), steps=tuple(rows), decisions=decisions)
    np.testing.assert_array_equal(window_savings(run), [1, 4, np.nan, 6])


def test_killed_run_is_told_as_unfinished(tmp_path: Path) -> None:
    folder = Recipe(steps=100, warmup=20, window=20, summary=False, evals=1).write(tmp_path / "run")
    # The evaluation and the end of the last step never reached the disk.
    cut_off(folder, 100)
    page = report(folder)
    assert "The run has not finished: it made 99 steps of 100 in 24.8 s" in page.text
    assert "without a validation loss" in page.text
    assert "The last line of metrics.jsonl is incomplete" in page.text
    assert page.row("finished") == ["no"]


def test_dense_run_has_no_ranks_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Recipe(controller="Dense", steps=50).write(tmp_path / "run")
    page = report(folder)
    assert Path(capsys.readouterr().out.splitlines()[-1]) == folder / "report" / "index.html"
    assert "as much as plain DDP; nothing was compressed" in page.text
    assert "Every matrix was averaged dense" in page.text
    assert "No decision was recorded" in page.text
    assert {path.stem for path in (folder / "report").glob("*.png")} == {"loss", "bytes"}


def test_nothing_but_one_step_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    row = {"kind": "step", "step": 0, "loss": None, "entropy": math.nan, "phase": "start"}
    (folder / "metrics.jsonl").write_text(json.dumps(row))
    page = report(folder)
    assert "it made 1 step, without a validation loss" in page.text
    assert "There is no config.yaml." in page.text
    assert "The loss was not recorded." in page.text


def test_diverged_run_does_not_show_an_older_loss(tmp_path: Path) -> None:
    folder = Recipe(steps=60, warmup=10, window=10, evals=3).write(tmp_path / "run")
    rows = load_rows(folder)
    for row in rows:
        if row["kind"] == "summary" or row["step"] > 30:
            row.update({key: math.nan for key in ("loss", "val_loss") if key in row})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page = report(folder)
    assert "its validation loss is not a finite number" in page.text
    assert page.row("validation loss (nats per byte)") == ["–"]
    assert (folder / "report" / "loss.png").exists()


def load_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"kind": "step", "step": step, "loss": 9.0, "phase": "fixed"} for step in (1, 2, 3)]
    rows += [{"kind": "step", "step": step, "loss": 1.0, "phase": "fixed"} for step in (2, 3, 4)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    steps, losses = load_run(folder).series("loss")
    assert steps.tolist() == [1, 2, 3, 4] and losses.tolist() == [9, 1, 1, 1]


def attempt(
    steps: range, ranks: dict[int, int], evals: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """What one attempt at these steps writes, in the order of the training loop."""
    rows: list[dict[str, Any]] = []
    for step in steps:
        rows.append({"kind": "step", "step": step, "seconds": 0.5, "attempt": steps[0]})
        if step in ranks:
            plan = {"phase": "compress", "ranks": {"a": ranks[step]}, "attempt": steps[0]}
            rows.append({"kind": "decision", "step": step, **plan})
        if step in evals:
            rows.append({"kind": "eval", "step": step, "val_loss": 2.0, "attempt": steps[0]})
    return rows


def run_of(folder: Path, rows: list[dict[str, Any]]) -> Run:
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return load_run(folder)


def steps_of(rows: tuple[dict[str, Any], ...]) -> list[int]:
    return [row["step"] for row in rows]


def test_an_extended_run_is_not_finished_where_it_once_was(tmp_path: Path) -> None:
    end = {"kind": "summary", "steps": 20, "seconds": 5.0, "val_loss": 1.5}
    run = run_of(tmp_path, [*attempt(range(20), {}), end, *attempt(range(20, 30), {})])
    assert run.summary is None and run.steps_done == 30
    assert sentence(run).startswith("The run has not finished: it made 30 steps in 15.0 s, without")
    run = run_of(tmp_path, [*load_rows(tmp_path), end | {"steps": 30}])
    assert run.summary == end | {"steps": 30}


def test_steps_and_decisions_of_a_dead_attempt_are_taken_back(tmp_path: Path) -> None:
    dead = attempt(range(480), {2: 32, 310: 16, 350: 2}, evals=(199, 399))
    run = run_of(tmp_path, [*dead, *attempt(range(300, 320), {305: 20})])
    assert (run.steps_done, run.seconds) == (320, 160.0)
    assert steps_of(run.evals) == [199]
    run = run_of(tmp_path, [*dead, *attempt(range(300, 360), {305: 20, 345: 12})])
    assert steps_of(run.decisions) == [2, 305, 345]
    assert path_words(run) == "32 → 12"


def test_an_attempt_takes_back_the_step_it_begins_with_and_none_before(tmp_path: Path) -> None:
    first = attempt(range(32), {29: 32, 30: 16, 31: 8}, evals=(29, 30))
    second = attempt(range(30, 31), {30: 4}, evals=(30,))
    third = attempt(range(31, 33), {32: 2})
    run = run_of(tmp_path, [*first, *second, *third])
    assert [(row["step"], row["attempt"]) for row in run.decisions] == [(29, 0), (30, 30), (32, 31)]
    assert [(row["step"], row["attempt"]) for row in run.evals] == [(29, 0), (30, 30)]
    assert [row["attempt"] for row in run.steps[28:]] == [0, 0, 30, 31, 31]
    # The same step once more: a run that was killed in it goes on from the checkpoint before.
    run = run_of(tmp_path, [*first, *attempt(range(31, 32), {})])
    assert steps_of(run.decisions) == [29, 30] and run.steps_done == 32


def test_late_news_of_a_stage_belong_to_the_attempt_that_tells_them(tmp_path: Path) -> None:
    late = {"kind": "decision", "phase": "compress", "stage": 1}
    told = [late | {"step": step, "ranks": {"a": 8}} for step in (6, 12)]
    again = [late | {"step": step, "ranks": {"a": 4}} for step in (10, 11)]
    rows = [*attempt(range(15), {}), *told, *attempt(range(10, 16), {}), *again]
    (stage,) = run_of(tmp_path, rows).later_stages
    assert steps_of(stage) == [6, 10, 11]
    # A decision that was told before its step is no earlier attempt's.
    early = [late | {"step": 1, "ranks": {"a": 8}}, *attempt(range(3), {})]
    assert steps_of(run_of(tmp_path, early).later_stages[0]) == [1]


def test_an_attempt_without_a_step_ends_the_run_where_it_went_on(tmp_path: Path) -> None:
    end = {"kind": "summary", "steps": 30, "first_step": 30, "seconds": 5.0}
    run = run_of(tmp_path, [*attempt(range(48), {20: 8, 30: 4}), end])
    assert (run.steps_done, run.last_step, steps_of(run.decisions)) == (30, 29, [20])


TIMES = {
    "old": ({}, " in 12.0 s", "12.0 s"),
    "whole": ({"first_step": 0}, " in 12.0 s", "12.0 s"),
    "resumed": (
        {"first_step": 500},
        ", the last 500 of them in 12.0 s",
        "12.0 s (last 500 steps)",
    ),
    "resumed at its end": ({"first_step": 1000}, "", "–"),
    "nonsense": ({"first_step": "x"}, " in 12.0 s", "12.0 s"),
}


@pytest.mark.parametrize("told, words, figure", TIMES.values(), ids=TIMES)
def test_a_time_is_told_with_the_steps_it_is_of(told: Any, words: str, figure: str) -> None:
    run = Run(Path("r"), summary={"steps": 1000, "seconds": 12.0, **told})
    assert sentence(run).startswith(f"The run finished 1,000 steps{words}, without a validation")
    assert key_figures(run)["time"] == figure


def test_a_run_that_goes_on_in_another_folder_times_its_own_steps(tmp_path: Path) -> None:
    run = run_of(tmp_path, attempt(range(500, 600), {}))
    assert "it made 600 steps, the last 100 of them in 50.0 s" in sentence(run)


HOSTILE = {
    "loss": '{"kind": "step", "step": 3, "loss": 1' + "0" * 400 + "}",
    "step": '{"kind": "step", "step": 1e308, "loss": 1}',
    "rank": '{"kind": "decision", "step": 3, "phase": "x", "ranks": {"w": Infinity}}',
    "whole step": '{"kind": "step", "step": 1' + "0" * 59 + ', "loss": 1}',
    "whole rank": '{"kind": "decision", "step": 3, "phase": "x", "ranks": {"w": 1'
    + "0" * 59
    + ', "v": 3}}',
    "ranks in a list": '{"kind": "decision", "step": 1, "ranks": [1]}\n'
    '{"kind": "decision", "step": 2, "ranks": {"w": 4}}',
    "kind": '{"kind": ["step"], "step": 3}',
    "number of stages": '{"kind": "step", "step": 3, "stages": 1' + "0" * 59 + "}",
    "no stages": '{"kind": "summary", "stages": []}',
    "stages that are none": '{"kind": "summary", "stages": [1]}',
    "stages without a name": '{"kind": "summary", "stages": [{"finish_seconds": 1}]}',
    "half a letter": '{"kind": "step", "step": 3, "loss": 1, "phase": "\\ud800"}',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_what_no_run_has_written_does_not_stop_the_page(tmp_path: Path, line: str) -> None:
    good = [f'{{"kind": "step", "step": {k}, "loss": {3 - k}}}' for k in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*good, line]) + "\n")
    assert main([str(tmp_path)]) == 0
    assert "<html" in (tmp_path / "report" / "index.html").read_text()


def test_numbers_that_no_run_counts_to_are_not_there(tmp_path: Path) -> None:
    decision = {"kind": "decision", "phase": "compress", "ranks": {"a": 8}}
    stages = [
        decision | {"step": 1, "stage": stage} for stage in (0, 1, 1024, 20000, -1, "1", None)
    ]
    steps = [decision | {"step": step} for step in (2, 2**53, -1, 3.5, True, None)]
    run = run_of(tmp_path, [*attempt(range(3), {}), *stages, *steps])
    assert run.stages == 2 and steps_of(run.decisions) == [1, 2]
    summary = {"kind": "summary", "steps": 10**59, "stages": [{}] * 1024}
    run = run_of(tmp_path, [{"kind": "step", "step": 1, "stages": 1024}, summary])
    assert (run.stages, run.stage_summaries, run.steps_done) == (1, (), 2)


def test_only_so_many_stages_are_drawn(tmp_path: Path) -> None:
    decision = {"kind": "decision", "step": 1, "phase": "compress", "ranks": {"a": 8}}
    stages = [{"finish_seconds": 0.5, "rank": 8}] * 1023
    last = decision | {"stage": 1022}
    run = run_of(
        tmp_path, [*attempt(range(3), {1: 8}), last, {"kind": "summary", "stages": stages}]
    )
    page = report(tmp_path)
    assert f"Drawn are the first {MOST_STAGES} of 1023 stages." in page.text
    assert page.text.count("No decision compressed a matrix") == MOST_STAGES - 1
    assert f"only of the first {MOST_STAGES} stages" in page.text
    assert draw_stages(run) is not None


def test_a_strangers_configuration_shows_nothing_of_the_viewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGC_SECRET", "s3cret")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2.0}\n')
    (tmp_path / "config.yaml").write_text("seed: ${oc.env:EDGC_SECRET}\n")
    config = load_run(tmp_path).config
    assert config is not None and config["seed"] == "${oc.env:EDGC_SECRET}"
    # A dozen such lines would make millions of entries.
    (tmp_path / "config.yaml").write_text("a: &a [x, x]\nb: [*a, *a]\n")
    run = load_run(tmp_path)
    assert run.config is None and "config.yaml is unreadable." in run.notes


def test_names_are_escaped(tmp_path: Path) -> None:
    folder = Recipe(steps=40, warmup=10, window=10, prefix="<b>&$x^$")
    folder_path = folder.write(tmp_path / "run <i>$_{&}$")
    rows = load_rows(folder_path)
    for row in rows:
        if row["kind"] == "decision":
            row["reason"] = "<script>alert(1)</script>"
    (folder_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page = report(folder_path)
    assert not {"script", "i", "b"} & set(page.tags)
    assert "<script>alert(1)</script>" in page.text and "run <i>$_{&}$" in page.text


@pytest.mark.parametrize("layers, parameters", [(1, 5), (37, 149)])
def test_heat_map_grows_with_the_parameters(tmp_path: Path, layers: int, parameters: int) -> None:
    recipe = Recipe(steps=200, window=20, warmup=40, layers=layers, per_matrix=True)
    folder = recipe.write(tmp_path / "run")
    run = load_run(folder)
    names, ranks_MD = rank_table(run)
    assert ranks_MD.shape == (parameters, len(run.decisions)) and len(names) == parameters
    assert (ranks_MD[:, 0] == 0).all() and ranks_MD[:3, 2].tolist() == [32, 28, 24]
    figure = draw_heatmap(run, width=9.0)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[1].get_yticklabels()]
    assert len(boxes) == parameters
    assert all(a.y0 >= b.y1 or b.y0 >= a.y1 for a, b in zip(boxes, boxes[1:], strict=False))


def test_heat_map_of_thousands_shows_compressed_ones_and_says_so(tmp_path: Path) -> None:
    ranks = {f"blocks.{place}.w": 8 * (place >= 3500) for place in range(4000)}
    row = {"kind": "decision", "step": 1, "phase": "compress", "ranks": ranks}
    run = run_of(tmp_path, [*attempt(range(3), {}), row])
    labels = [text.get_text() for text in draw_heatmap(run, width=9.0).axes[1].get_yticklabels()]
    assert (len(labels), labels[0], labels[-1]) == (MOST_MATRICES, "3500.w", "3699.w")
    assert (
        f"Drawn are {MOST_MATRICES} of 4,000 matrices, dense ones only where"
        in report(tmp_path).text
    )


@pytest.mark.parametrize("kind", ["missing", "no metrics", "sweep", "empty"])
def test_folder_that_is_no_run_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder = tmp_path / "x"
    if kind != "missing":
        folder.mkdir()
    if kind == "sweep":
        Recipe(steps=4).write(folder / "monday" / "0")
    if kind == "empty":
        (folder / "metrics.jsonl").touch()
    assert main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert not captured.out and len(captured.err.splitlines()) == 1
    assert str(folder / "metrics.jsonl") in captured.err
    assert (str(folder / "monday" / "0") in captured.err) == (kind == "sweep")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("three")
    return [
        Recipe().write(root / "edgc"),
        Recipe(controller="FixedRank", r_max=16, loss_end=1.7).write(root / "_fixed"),
        Recipe(controller="Dense", loss_end=1.45, summary=False).write(root / "dense"),
    ]


def test_comparison_lays_runs_side_by_side(
    three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", *map(str, three), "--out", str(out)]) == 0
    assert Path(capsys.readouterr().out.splitlines()[-1]) == out / "index.html"
    page = Page(out / "index.html")
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert {p.stem for p in out.glob("*.png")} == {"loss", "loss_by_bytes", "rank", "bytes"}
    assert page.row("controller") == ["EntropyController", "FixedRank", "Dense"]
    assert page.row("rank path") == ["32 → 8", "16", "–"]
    assert page.row("controller.r_max") == ["32", "16", "32"]
    assert not [cells for cells in page.cells if cells and cells[0] == "train.steps"]


def test_comparison_goes_to_the_current_folder(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *map(str, three[:2])]) == 0
    assert (tmp_path / "compare" / "index.html").is_file()


def test_comparison_wants_two_runs(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["compare", str(three[0])])
    assert stopped.value.code == 2
    assert "two or more expected" in capsys.readouterr().err


def test_labels_tell_runs_apart() -> None:
    runs = [Run(Path("/a/x/0")), Run(Path("/b/x/0")), Run(Path("/b/x/0"))]
    assert len(set(labels(runs))) == 3
