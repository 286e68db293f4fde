"""A suite as pictures: its graph with states, and its jobs over time beside the deadline. Pictures become plain lists,
from which a page builds its elements one by one: no text of a suite is ever read as markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from sameday.report.charts import scale, tag, text, ticks, title
from sameday.spec.words import number

BOX, TALL, ACROSS, DOWN = 196, 46, 54, 14
LONGEST = 23
"""Letters of a name that a box has room for."""


def as_lists(svg: str) -> list[Any]:
    """An element as [name, attributes, content], where content is text or further elements."""

    def listed(element: ElementTree.Element) -> list[Any]:
        name = element.tag.rpartition("}")[2]
        return [name, dict(element.attrib), [*([element.text] if element.text else []), *map(listed, element)]]

    return listed(ElementTree.fromstring(svg))


def layers(graph: Mapping[str, Sequence[str]], order: Sequence[str]) -> list[list[str]]:
    """Jobs by how many others must be done before them, each near those that it waits for."""
    depth: dict[str, int] = {}
    for name in order:
        depth[name] = 1 + max((depth[need] for need in graph[name]), default=-1)
    columns: list[list[str]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
    for name in graph:
        columns[depth[name]].append(name)
    row: dict[str, float] = {}
    for column in columns:
        column.sort(key=lambda name: sum(row[n] for n in graph[name]) / len(graph[name]) if graph[name] else 0.0)
        row |= {name: i for i, name in enumerate(column)}
    return columns


@dataclass(frozen=True)
class Node:
    """What a box says of its job: the state names its colour."""

    state: str
    said: str
    about: str


def graph_picture(graph: Mapping[str, Sequence[str]], order: Sequence[str], nodes: Mapping[str, Node]) -> str:
    columns = layers(graph, order)
    rows = max(map(len, columns), default=0)
    width = len(columns) * (BOX + ACROSS) - ACROSS + 4
    height = rows * (TALL + DOWN) - DOWN + 4
    place = {
        name: (2 + i * (BOX + ACROSS), 2 + (k + (rows - len(column)) / 2) * (TALL + DOWN))
        for i, column in enumerate(columns)
        for k, name in enumerate(column)
    }
    edges, boxes = [], []
    for name, needs in graph.items():
        x, y = place[name]
        for need in needs:
            left, top = place[need][0] + BOX, place[need][1] + TALL / 2
            bend = ACROSS / 2
            path = f"M{left:.1f} {top:.1f}C{left + bend:.1f} {top:.1f} {x - bend:.1f} {y + TALL / 2:.1f} {x:.1f} "
            edges.append(tag("path", d=f"{path}{y + TALL / 2:.1f}", class_=f"edge e-{nodes[need].state}"))
        node = nodes[name]
        short = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
        inner = title(f"{name}: {node.about}")
        inner += tag("rect", x=x, y=y, width=BOX, height=TALL, rx=9, class_="box")
        inner += text(short, x=x + 12, y=y + 19, class_="name")
        inner += text(node.said, x=x + 12, y=y + 36, class_="said")
        boxes.append(tag("g", inner, class_=f"node s-{node.state}", data_job=name))
    about = title("The jobs, and what each waits for")
    whole = about + "".join(edges) + "".join(boxes)
    return tag("svg", whole, viewBox=f"0 0 {width} {height}", width=width, height=height, class_="graph", role="img")


@dataclass(frozen=True)
class Span:
    """A job over time, in seconds since 1970: from its start to its end or to now, and from there to its expected
    end."""

    name: str
    state: str
    start: float
    end: float
    expected: float | None
    said: str


def time_picture(spans: Sequence[Span], began: float, now: float, deadline: float | None, width: int) -> str:
    """A row for each job, the deadline and the moment as lines across all of them."""
    ends = [now, *(span.end for span in spans), *(span.expected or 0.0 for span in spans), deadline or 0.0]
    most = max(1.0, 1.03 * (max(ends) - began))
    unit, size = ("seconds", 1) if most < 180 else ("minutes", 60) if most < 3 * 3600 else ("hours", 3600)
    left, right, row, top = 2.0, width - 2.0, 34, 22
    bottom = top + len(spans) * row

    def place(moment: float) -> float:
        return scale(min(max(moment - began, 0.0), most), 0.0, most, left, right)

    parts = []
    for value in ticks(0.0, most / size, 6):
        x = place(began + value * size)
        parts.append(tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
        where = "start" if x < left + 12 else "end" if x > right - 24 else "centre"
        parts.append(text(number(value), x=x, y=bottom + 17, class_=f"tick {where}"))
    parts.append(text(f"{unit} since the first job began", x=width / 2, y=bottom + 38, class_="tick centre"))
    for i, span in enumerate(spans):
        y = top + i * row + 17
        start, end = place(span.start), place(span.end)
        bars = title(f"{span.name}: {span.said}")
        if span.expected is not None and span.expected > span.end:
            ahead = max(1.0, place(span.expected) - end)
            bars += tag("rect", x=end, y=y, width=ahead, height=12, rx=3, class_="bar ahead")
        if span.end > span.start:
            bars += tag("rect", x=start, y=y, width=max(2.0, end - start), height=12, rx=3, class_="bar")
        at = {"x": start, "class_": "tick start"} if start < 0.6 * width else {"x": end, "class_": "tick end"}
        bars += text(f"{span.name}: {span.said}"[:60], y=y - 4, **at)
        parts.append(tag("g", bars, class_=f"s-{span.state}", data_job=span.name))
    for moment, kind, said in ((now, "now", "now"), (deadline, "deadline", "deadline")):
        if moment is not None:
            x = place(moment)
            parts.append(tag("line", title(said), x1=x, x2=x, y1=top - 6, y2=bottom, class_=kind))
            if kind == "now" and deadline is not None and abs(place(deadline) - x) < 90:
                continue  # their names would lie on each other
            where = "start" if x < 40 else "end" if x > width - 40 else "centre"
            parts.append(text(said, x=x, y=top - 10, class_=f"tick {where} {kind}"))
    about = title("The jobs over time, and the deadline")
    return tag("svg", about + "".join(parts), viewBox=f"0 0 {width} {bottom + 46}", class_="chart", role="img")
