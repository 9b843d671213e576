"""The figures of `kestrel eval adapter` for people: tables for the terminal, and a page that shows the worst pictures.

The page is one file with its pictures inside, and needs nothing from anywhere.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from PIL import Image
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kestrel.errors import cut
from kestrel.evals.adapter import Judged, MarkedPlace, PictureErrors, picture_errors
from kestrel.evals.coco_metrics import Figures
from kestrel.evals.plans import LocatePlan
from kestrel.evals.report import shown
from kestrel.train.adapter.samples import PictureFolder

COLUMNS = ("name", "objects", "found", "right", "AP", "AP50", "precision", "recall", "F1")
EVERY_NAME = "all"
LONGEST_NAME = 15
"""In the terminal, so that a row fits into 80 columns."""
MOST_PICTURES = 24
LONGEST_SIDE = 720
"""Of a picture in the page, in pixels."""
KINDS = {"truth": "truth, found", "missed": "truth, missed", "right": "found, right", "wrong": "found, wrong"}
"""Of marks, by their class in the page."""


def as_tables(sides: Sequence[Judged], plan: LocatePlan) -> Group:
    parts: list[Table | Text] = [Text(summary(sides[0], plan))]
    for side in sides:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column(COLUMNS[0], style="bold", no_wrap=True)
        for name in COLUMNS[1:]:
            table.add_column(name, justify="right", no_wrap=True)
        for name, *cells in _rows(side):
            table.add_row(cut(name, LONGEST_NAME), *cells)
        parts += [Text(f"\n{side.name}: {threshold_text(side)}"), table]
    return Group(*parts)


def summary(side: Judged, plan: LocatePlan) -> str:
    questions = [answer.question for answer in side.answers]
    pictures, objects = {question.picture.path for question in questions}, sum(len(each.true) for each in questions)
    absent = sum(not question.true for question in questions)
    return (
        f"{plan.skill}: {_counted(len(pictures), 'picture')}, {_counted(objects, 'object')}, "
        f"{_counted(len(questions), 'question')}, {absent} of them about what is not there"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def threshold_text(side: Judged) -> str:
    """What the figures beside AP count."""
    threshold = side.figures.threshold
    told = "every answer counts"
    if threshold is not None:
        told = f"answers with a score of {threshold:.3f} or more count, which gives the best F1"
    return f"{told}; {len(side.errors)} requests failed, and found nothing" if side.errors else told


def _rows(side: Judged) -> Iterator[tuple[str, ...]]:
    yield EVERY_NAME, *_cells(side.figures.overall)
    for label, figures in side.figures.labels.items():
        yield label, *_cells(figures)


def _cells(figures: Figures) -> tuple[str, ...]:
    counts = figures.num_true, figures.num_predicted, figures.num_matched
    shares = figures.ap, figures.ap50, figures.precision, figures.recall, figures.f1
    return *map(str, counts), *(shown(share) for share in shares)


# ---------------------------------------------------------------------- the page


def render(sides: Sequence[Judged], plan: LocatePlan, pictures: PictureFolder) -> str:
    """The worst pictures are those of the first side."""
    every = picture_errors(sides[0])
    wrong = [each for each in every if each.num_errors]
    told = f"{len(wrong)} of {len(every)} pictures have something missed or wrong in them"
    if len(wrong) > MOST_PICTURES:
        told += f"; the {MOST_PICTURES} with most of it"
    return Template(_beside("adapter_page.html")).substitute(
        style=_beside("adapter_page.css"),
        title=escape(f"{sides[0].name} on annotated pictures"),
        asked=escape(summary(sides[0], plan)),
        tables="".join(_section(side) for side in sides),
        worst=escape(f"{told}." if wrong else "Nothing is missed and nothing wrong."),
        legend=_legend() if wrong else "",
        pictures="".join(_figure(each, pictures) for each in wrong[:MOST_PICTURES]),
    )


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _section(side: Judged) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for first, *cells in _rows(side)
    )
    label = escape(f"Figures of {side.name}")
    table = f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
    table += f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    return f'<section><h2>{escape(side.name)}</h2><p class="note">{escape(threshold_text(side))}</p>{table}</section>'


def _legend() -> str:
    place = 'x="2" y="2" width="24" height="8"'
    lines = (
        f'<li><svg viewBox="0 0 28 12" aria-hidden="true">{_edged("rect", kind, place)}</svg>{told}</li>'
        for kind, told in KINDS.items()
    )
    return f'<ul class="legend">{"".join(lines)}</ul>'


def _edged(shape: str, kind: str, place: str, title: str = "") -> str:
    """Over a dark edge, so that it can be seen on every colour."""
    return f'<{shape} class="under" {place}/><{shape} class="{kind}" {place}>{title}</{shape}>'


def _figure(errors: PictureErrors, pictures: PictureFolder) -> str:
    picture = Image.fromarray(pictures.read(errors.picture).pixels)
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    encoded = io.BytesIO()
    picture.save(encoded, "JPEG", quality=85)
    source = f"data:image/jpeg;base64,{base64.b64encode(encoded.getvalue()).decode()}"
    name = escape(pictures.name_of(errors.picture))
    missed = Counter(place.label for place in errors.places if place.is_truth and not place.is_right)
    wrong = Counter(place.label for place in errors.places if not place.is_truth and not place.is_right)
    told = "; ".join(
        f"{what}: {escape(', '.join(f'{count} {label}' for label, count in labels.items()))}"
        for what, labels in (("missed", missed), ("wrong", wrong))
        if labels
    )
    marks = "".join(
        _mark(place, picture.width, picture.height)
        for place in sorted(errors.places, key=lambda each: not each.is_right)
    )
    return (
        f'<figure><svg viewBox="0 0 {picture.width} {picture.height}" role="img" aria-label="{name}: {told}">'
        f'<image href="{source}" width="{picture.width}" height="{picture.height}"/>{marks}</svg>'
        f'<figcaption><b>{name}</b><span class="errors">{told}</span></figcaption></figure>'
    )


def _mark(marked: MarkedPlace, width: int, height: int) -> str:
    """What is right has its name in a tooltip, so that names of what is not can be read."""
    kind = ("truth" if marked.is_right else "missed") if marked.is_truth else ("right" if marked.is_right else "wrong")
    x, y = marked.place[0] * width, marked.place[1] * height
    if len(marked.place) == 2:
        shape, at = "circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{width / 90:.1f}"'
    else:
        sides = (marked.place[2] - marked.place[0]) * width, (marked.place[3] - marked.place[1]) * height
        shape, at = "rect", f'x="{x:.1f}" y="{y:.1f}" width="{sides[0]:.1f}" height="{sides[1]:.1f}"'
    told = escape(marked.label if marked.score is None else f"{marked.label} {marked.score:.2f}")
    drawn = _edged(shape, kind, at, f"<title>{kind}: {told}</title>")
    if marked.is_right:
        return drawn
    size, anchor = max(width, height) / 30, "end" if x > 0.75 * width else "start"
    place = f'x="{min(max(x, 2), width - 2):.1f}" y="{max(y - size / 3, size):.1f}" text-anchor="{anchor}"'
    return (
        f'{drawn}<text class="{kind}-name" {place} font-size="{size:.1f}" stroke-width="{size / 5:.1f}">{told}</text>'
    )
