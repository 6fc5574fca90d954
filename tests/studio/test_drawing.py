"""Drawings of graphs: golden pictures; and no picture loses or invents a node or an edge."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from textwrap import dedent
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import Drawing, DrawnEdge, DrawnNode
from penstock.engine.drawing import Kind
from penstock.studio.drawing import in_parts, to_dot, to_mermaid, to_svg, to_text
from tests.conftest import EFFORT

few = settings(max_examples=20 * EFFORT)  # large examples
SVG = "{http://www.w3.org/2000/svg}"
EVERY_FORMAT = [to_text, to_mermaid, to_dot, to_svg]
KINDS: dict[str, Kind] = {"?": "input", "!": "control", "=": "output"}


def draw(title: str, lines: str, *bodies: tuple[str, Drawing]) -> Drawing:
    """Read `kind id:label < source@edge-label source | detail`, one node a line; the kind is ?, !, = or nothing."""
    nodes: list[DrawnNode] = []
    for line in lines.strip().splitlines():
        head, _, detail = line.partition("|")
        name, _, sources = head.partition("<")
        name = name.strip()
        kind = KINDS.get(name[0], "node")
        id_, _, label = name.lstrip("?!=").partition(":")
        edges = tuple(DrawnEdge(*source.split("@")) for source in sources.split())
        nodes.append(DrawnNode(id_, label or id_, detail.strip(), kind, edges))
    return Drawing(title, tuple(nodes), bodies)


def assert_text(drawing: Drawing, expected: str) -> None:
    assert to_text(drawing) == dedent(expected).strip("\n")


TRIAGE = draw(
    "triage",
    """
    ?ticket
    load_customer < ticket@.customer | pool, 2 s
    language < ticket@.text
    translate < ticket@.text language | 3 attempts
    embed < translate | gpu:0, batches of 32
    similar < embed | 8 at once
    sentiment < translate | gpu:0
    history < load_customer | pool
    priority < sentiment history similar
    draft < translate similar history | 10 s, fallback
    check < draft | thread
    reply < check priority load_customer
    """,
)


def agent() -> Drawing:
    fix = draw("then", "?s\nfix < s\n=result < fix")
    keep = draw("otherwise", "?s\n=result < s")
    step = draw("body", "?state\nstep < state | gpu:0\n!c:cond < step\n=result < c", ("c", fix), ("c", keep))
    unfinished = draw("while", "?state\nunfinished < state\n=result < unfinished")
    premium = draw("then", "?q\npremium < q\n=result < premium")
    basic = draw("otherwise", "?q\nbasic < q | 2 s\npolish < q basic\n=result < polish")
    return draw(
        "agent",
        """
        ?question
        classify < question
        lookup < question
        !c:cond < classify question
        !w:while_loop < c lookup | at most 8 times
        =result < w
        """,
        ("c", premium),
        ("c", basic),
        ("w", unfinished),
        ("w", step),
    )


def test_twelve_nodes_with_joins_and_branches_fit_a_screen() -> None:
    assert_text(
        TRIAGE,
        """
        triage

        ○          ticket
        ├─●        load_customer   ← ticket.customer   pool, 2 s
        ├─│─●      language        ← ticket.text
        ●─│─╯      translate       ← ticket.text, language   3 attempts
        ├─│─●      embed           gpu:0, batches of 32
        │ │ ●      similar         8 at once
        ├─│─│─●    sentiment       gpu:0
        │ ├─│─│─●  history         pool
        │ │ ├─●─┤  priority        ← sentiment, history, similar
        ●─│─┴─│─╯  draft           ← translate, similar, history   10 s, fallback
        ● │   │    check           thread
        ●─┴───╯    reply           ← check, priority, load_customer
        """,
    )


def test_siblings_that_look_alike_are_folded() -> None:
    lanes = "\n".join(f"f{n}:fetch < urls@[{n}] | 8 at once\np{n}:parse < f{n}" for n in range(32))
    parsed = " ".join(f"p{n}" for n in range(32))
    assert_text(
        draw("crawl", f"?urls\n{lanes}\nmerge < {parsed}\n=result < merge"),
        """
        crawl

        ○  urls
        ●  fetch ×32   ← urls[…]   8 at once
        ●  parse ×32
        ●  merge       ← parse ×32
        ◎  result
        """,
    )


def test_only_what_may_be_exchanged_is_folded() -> None:
    # p and q read the same fetch, r and s each read their own. Drawn alike, the two cases would look the same.
    crossed = draw("g", "?x\na:f < x\nb:f < x\np < a\nq < a\nr < a\ns < b\n=y < p q r s")
    assert "×" not in to_text(crossed)
    differing = draw("g", "?x\na:f < x | thread\nb:f < x | process\n=y < a b")
    assert "×" not in to_text(differing)
    assert "f#2" in to_text(differing)  # two nodes of one name are told apart where they are read
    parted = draw("g", "?x\na:f < x\nb:f < x\ny < a x\nz < b x")
    assert "×" not in to_text(parted)
    then, otherwise = draw("then", "?q\nkeep < q"), draw("then", "?q\ndrop < q")
    driving = draw("g", "?x\n!a:cond < x\n!b:cond < x\n=y < a b", ("a", then), ("b", otherwise))
    assert "keep" in to_text(driving)
    assert "drop" in to_text(driving)
    everyone = draw("g", "?x\na:f < x\nb:f < x\nc:g < a b\nd:g < a b\n=y < c d")
    assert "g ×2   ← f ×2" in to_text(everyone)


def test_bodies_stand_under_the_node_that_drives_them() -> None:
    assert_text(
        agent(),
        """
        agent

        ○      question
        ├─●    classify
        ├─│─●  lookup
        ◆─╯ │  cond         ← classify, question
        │   │    then: q → premium → result
        │   │    otherwise:
        │   │    ○    q
        │   │    ├─●  basic    2 s
        │   │    ●─╯  polish   ← q, basic
        │   │    ◎    result
        ◆───╯  while_loop   ← cond, lookup   at most 8 times
        │        while: state → unfinished → result
        │        body:
        │        ○  state
        │        ●  step     gpu:0
        │        ◆  cond
        │        │    then:      s → fix → result
        │        │    otherwise: s → result
        │        ◎  result
        ◎      result
        """,
    )


def test_a_node_without_readers_does_not_seem_to_lead_on() -> None:
    lines = to_text(draw("g", "?x\nlog < x\n?y\nf < y")).splitlines()[2:]
    assert lines == ["○    x", "●    log", "  ○  y", "  ●  f"]


def test_too_many_rails_become_a_list_of_what_is_read() -> None:
    lines = to_text(fan_of(30)).splitlines()
    assert lines[3] == "•  n0     ← x"
    assert lines[-1].endswith("… 16 more")
    assert max(map(len, lines)) <= 100


def crawl(names: int) -> Drawing:
    """A graph of a hundred lanes; their first steps have so many names."""
    lines = "\n".join(f"f{n}:fetch{n % names} < x\np{n}:parse < f{n}" for n in range(100))
    return draw("crawl", f"?x\n{lines}\nmerge < {' '.join(f'p{n}' for n in range(100))}\n=result < merge")


def test_a_large_graph_is_summarised_and_the_numbers_add_up() -> None:
    # Five lanes of each of twenty names, folded, are forty rows: they can be drawn.
    assert to_text(crawl(20)).count("×5") >= 40
    fetches = "\n".join(f"      2  fetch{n}" for n in range(11))
    expected = f"""\
crawl

too large to draw: 203 nodes, 301 edges, 5 levels, up to 100 wide

  nodes  name
    100  parse
{fetches}
     81  of 42 other names

  level  nodes
      0  x
      1  fetch0 ×2, fetch1 ×2, fetch2 ×2, fetch3 ×2 and 92 more
      2  parse ×100
      3  merge
      4  result"""
    assert to_text(crawl(50)) == expected


def test_bodies_that_would_bury_their_graph_are_counted() -> None:
    long = draw("body", "?x\n" + "\n".join(f"step{n} < {f'step{n - 1}' if n else 'x'} | thread" for n in range(49)))
    loops = "\n".join(f"!w{n}:while_loop < x" for n in range(3))
    text = to_text(draw("g", f"?x\n{loops}", *((f"w{n}", long) for n in range(3))))
    assert text.count("body: not shown (nodes: 50)") == 3
    assert "step" not in text
    wide = draw("body", "\n".join(f"leaf{n}" for n in range(149)))
    inner = draw("body", "\n".join(f"!w{n}" for n in range(20)), *((f"w{n}", wide) for n in range(20)))
    svg = to_svg(draw("g", "!w", ("w", inner)))
    assert "not shown (nodes: 20, bodies: 20)" in svg
    assert "leaf" not in svg


def line_of(length: int) -> Drawing:
    return draw("line", "\n".join(["0:start", *(f"{n}:step < {n - 1}" for n in range(1, length))]))


def fan_of(width: int) -> Drawing:
    names = [f"n{n}" for n in range(width)]
    return draw("fan", "\n".join(["?x", *(f"{name} < x" for name in names), f"join < {' '.join(names)}"]))


def nested(depth: int) -> Drawing:
    drawing = draw("innermost", "x")
    for _ in range(depth):
        drawing = draw("then", "x\n!c:cond < x", ("c", drawing))
    return drawing


def test_large_graphs_are_whole_in_mermaid_and_dot_and_counted_in_the_others() -> None:
    for drawing, edges in ((line_of(10_000), 9_999), (fan_of(1_000), 2_000)):
        assert to_mermaid(drawing).count(" --> ") == to_dot(drawing).count(" -> ") == edges
    assert to_mermaid(nested(3_000)).count("subgraph") == to_dot(nested(3_000)).count("subgraph") == 3_000
    for to_format in (to_text, to_svg):
        assert "10,000 nodes, 9,999 edges, 10,000 levels, up to 1 wide" in to_format(line_of(10_000))
        assert "1,002 nodes, 2,000 edges, 3 levels, up to 1,000 wide" in to_format(fan_of(1_000))
        assert "not shown (nodes: 2, bodies: 1)" in to_format(nested(3_000))


@pytest.mark.parametrize("to_format", EVERY_FORMAT)
@pytest.mark.parametrize(
    ("drawing", "message"),
    [
        (Drawing("g", (DrawnNode("a", "a"), DrawnNode("a", "b"))), "two nodes of 'g' have the id 'a'"),
        (Drawing("g", (DrawnNode("a", "a", inputs=(DrawnEdge("b"),)),)), "'a' of 'g' reads an unknown node 'b'"),
        (Drawing("g", (), (("a", Drawing("then", ())),)), "the body 'then' of 'g' belongs to an unknown node 'a'"),
        (draw("g", "a < b\nb < a"), "the edges of 'g' form a cycle"),
    ],
)
def test_what_is_no_graph_is_refused(drawing: Drawing, message: str, to_format: Callable[[Drawing], str]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        to_format(drawing)


@pytest.mark.parametrize("to_format", EVERY_FORMAT)
def test_nothing_and_little_can_be_drawn(to_format: Callable[[Drawing], str]) -> None:
    assert "empty" in to_format(Drawing("empty", ()))
    assert "only" in to_format(Drawing("g", (DrawnNode("a", "only"),)))
    hollow = Drawing("g", (DrawnNode("a", "cond", kind="control"),), (("a", Drawing("hollow", ())),))
    assert "hollow" in to_format(hollow)


def test_nodes_may_come_in_any_order() -> None:
    backwards = Drawing("search", tuple(reversed(TRIAGE.nodes)))
    names = [re.sub("^[^a-z]+", "", line).split(" ")[0] for line in to_text(backwards).splitlines()[2:]]
    assert sorted(names) == sorted(node.label for node in TRIAGE.nodes)
    for node in TRIAGE.nodes:
        for edge in node.inputs:
            assert names.index(edge.source_id) < names.index(node.id)


# -- no picture loses or invents anything ------------------------------------------------------------------------------

labels = st.text(max_size=3) | st.sampled_from(
    ['a"b', "x]", "#quot;", "&amp;", "\\N", "end", "<b>", "\x1b[31m", "日本"]
)


@st.composite
def graphs(draw_: st.DrawFn, *, labels: st.SearchStrategy[str] | None = None, most: int = 14) -> Drawing:
    nodes: list[DrawnNode] = []
    for at in range(draw_(st.integers(1, most))):
        sources = draw_(st.lists(st.integers(0, at - 1), max_size=4)) if at else []
        label = f"node{at}" if labels is None else draw_(labels)
        nodes.append(DrawnNode(str(at), label, inputs=tuple(DrawnEdge(str(source)) for source in sources)))
    return Drawing("graph", tuple(nodes))


def edges_of(drawing: Drawing) -> list[tuple[str, str]]:
    label = {node.id: node.label for node in drawing.nodes}
    return sorted((label[edge.source_id], node.label) for node in drawing.nodes for edge in node.inputs)


def shown(label: str) -> str:
    """The label as a terminal can show it, on one line."""
    line = " ".join(label.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def read_rails(text: str) -> set[tuple[str, str]]:
    """Read the edges back from the rails alone, as an eye does."""
    edges: set[tuple[str, str]] = set()
    rails: dict[int, str] = {}
    for line in text.splitlines()[2:]:
        at_name = line.index("node")
        name, cells = line[at_name:].split(" ")[0], line[:at_name]
        node_at = re.search("[○●◆◎]", cells)
        assert node_at
        rails = {at: source for at, source in rails.items() if at == node_at.start() or cells[at] in "│├┼┤╰┴╯"}
        for at, source in list(rails.items()):
            if cells[at] != "│":
                edges.add((source, name))
            if cells[at] in "╰┴╯":
                del rails[at]
        rails[node_at.start()] = name
    return edges


@few
@given(graphs(labels=st.sampled_from("fgh"), most=50), st.integers(1, 9))
def test_parts_of_a_large_graph_keep_each_step_and_each_edge(drawing: Drawing, few: int) -> None:
    whole, parts = in_parts(drawing, few)
    inside = {part: body for part, body in whole.bodies if part in parts}
    box_of = {node.id: node.id for node in whole.nodes if node.id not in parts}
    box_of |= {node.id: part for part, body in inside.items() for node in body.nodes}
    assert sorted(box_of) == sorted(node.id for node in drawing.nodes)
    assert all(2 <= len(body.nodes) <= max(20, len(drawing.nodes) // few) for body in inside.values())
    kept = [(edge.source_id, node.id) for body in inside.values() for node in body.nodes for edge in node.inputs]
    kept += [(edge.source_id, node.id) for node in whole.nodes for edge in node.inputs]
    edges = [(edge.source_id, node.id) for node in drawing.nodes for edge in node.inputs]
    ends = [(box_of[source], box_of[target]) for source, target in edges]
    assert Counter(kept) == Counter(
        pair if pair[0] != pair[1] else edge for edge, pair in zip(edges, ends, strict=True)
    )
    to_svg(whole)  # refuses a cycle of edges


@pytest.mark.parametrize(("large", "found"), [(line_of(300), 15), (fan_of(299), 17)], ids=["row", "wide"])
def test_a_row_and_a_wide_graph_become_few_boxes(large: Drawing, found: int) -> None:
    whole, _ = in_parts(large)
    assert len(whole.nodes) == found


@given(graphs())
def test_rails_tell_every_edge_and_no_other(drawing: Drawing) -> None:
    assert read_rails(to_text(drawing)) == set(edges_of(drawing))


@few
@given(graphs(labels=st.sampled_from("fgh"), most=24))
def test_folded_counts_add_up(drawing: Drawing) -> None:
    drawn = Counter[str]()
    for line in to_text(drawing).splitlines()[2:]:
        found = re.search(r"([fgh])(#\d+)?( ×(\d+))?", line)
        assert found
        drawn[found[1]] += int(found[4] or 1)
    assert drawn == Counter(node.label for node in drawing.nodes)


@few
@given(graphs(labels=labels))
def test_text_mentions_every_node_on_a_line_of_its_own(drawing: Drawing) -> None:
    text = to_text(drawing)
    for node in drawing.nodes:
        assert shown(node.label) in text
    assert not re.search(r"[^\n\x20-\x7e\x80-\U0010ffff]", text)
    assert len(text.splitlines()) <= 2 + len(drawing.nodes)


def unquoted(text: str) -> str:
    """Read the text of a label of Mermaid."""
    found = re.sub(r"#(\d+);", lambda code: chr(int(code[1])), text)
    return "" if found == " " else found


@pytest.mark.parametrize(
    ("to_format", "node", "arrow", "label_of"),
    [
        (to_mermaid, r' {4}(n\d+)\("([^"\[\]{}|<>`&\\]*)"\)', " --> ", unquoted),
        (
            to_dot,
            r' {4}(n\d+) \[label="((?:[^"\\]|\\.)*)", shape=.*\];',
            " -> ",
            lambda text: re.sub(r"\\(.)", r"\1", text).replace("&amp;", "&"),
        ),
    ],
)
@few
@given(drawing=graphs(labels=labels))
def test_mermaid_and_dot_have_every_node_and_edge(
    to_format: Callable[[Drawing], str], node: str, arrow: str, label_of: Callable[[str], str], drawing: Drawing
) -> None:
    names: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for line in to_format(drawing).splitlines()[4:]:
        if found := re.fullmatch(node, line):
            names[found[1]] = label_of(found[2])
        elif arrow in line:
            source, target = line.strip().rstrip(";").split(arrow)
            edges.append((names[source], names[target]))
    assert sorted(names.values()) == sorted(shown(node.label) for node in drawing.nodes)
    assert sorted(edges) == sorted((shown(source), shown(target)) for source, target in edges_of(drawing))


def boxes_of(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """Left, top, right and bottom of the boxes of a picture without bodies, by label."""
    boxes: dict[str, tuple[float, float, float, float]] = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        rect, label = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        place = re.fullmatch(r"translate\((\S+) (\S+)\)", group.get("transform", ""))
        if rect is not None and label is not None and place:
            left, top = float(place[1]), float(place[2])
            assert label.text
            boxes[label.text] = (left, top, left + float(rect.get("width", "")), top + float(rect.get("height", "")))
    return boxes


@few
@given(graphs())
def test_svg_has_every_node_and_edge_and_no_box_on_another(drawing: Drawing) -> None:
    svg = to_svg(drawing)
    boxes = boxes_of(svg)
    assert sorted(boxes) == sorted(node.label for node in drawing.nodes)
    for source, target in edges_of(drawing):
        assert boxes[source][3] < boxes[target][1]  # downwards
    for one, other in combinations(boxes.values(), 2):
        (left, top, right, bottom), (other_left, other_top, other_right, other_bottom) = one, other
        assert right <= other_left or other_right <= left or bottom <= other_top or other_bottom <= top
    edges = {path.findtext(f"{SVG}title") for path in ElementTree.fromstring(svg).iter(f"{SVG}path")} - {None}
    assert edges == {f"{source} → {target}" for source, target in edges_of(drawing)}


@few
@given(graphs(labels=labels))
def test_svg_is_well_formed_whatever_the_labels(drawing: Drawing) -> None:
    texts = [text.text or "" for text in ElementTree.fromstring(to_svg(drawing)).iter(f"{SVG}text")]
    assert all(any(text.startswith(shown(node.label)) for text in texts) for node in drawing.nodes)


def test_svg_needs_nothing_from_elsewhere_and_follows_the_colour_scheme() -> None:
    svg = to_svg(agent())
    assert not re.search(r"href|url\(|<script|@import|<image|<foreignObject", svg)
    assert svg.count("http") == 1  # the namespace
    assert "prefers-color-scheme:dark" in svg
    for title in ("then", "otherwise", "while", "body"):
        assert f">{title}</text>" in svg


def test_what_has_one_source_and_one_reader_stands_under_its_source_in_svg() -> None:
    graph = "?query\nhttp | resource\nfetch < http query | 2 s, 2 attempts\nweb < http query | 2 s, fallback"
    rest = "rerank < query fetch web\nanswer < query rerank\na_longer_name < answer | thread\n=result < a_longer_name"
    boxes = boxes_of(to_svg(draw("rag", f"{graph}\n{rest}")))
    middles = [boxes[name][0] + boxes[name][2] for name in ("answer", "a_longer_name", "result")]
    assert max(middles) - min(middles) < 2


def test_boxes_are_ordered_so_that_edges_do_not_cross_in_svg() -> None:
    boxes = boxes_of(to_svg(draw("g", "a\nb\nc\nd < c\ne < b\nf < a\n")))
    assert (boxes["a"] < boxes["b"] < boxes["c"]) == (boxes["f"] < boxes["e"] < boxes["d"])
    assert (boxes["a"] > boxes["b"] > boxes["c"]) == (boxes["f"] > boxes["e"] > boxes["d"])


def test_labels_of_edges_and_details_are_shown_and_escaped() -> None:
    drawing = draw("g", "?x\nf < x@.a[0] | 5 s, <b>")
    assert "← x.a[0]   5 s, <b>" in to_text(drawing)
    assert '-->|".a#91;0#93;"|' in to_mermaid(drawing)
    assert "<br/><small>5 s, #60;b#62;</small>" in to_mermaid(drawing)
    assert '[label=".a[0]"]' in to_dot(drawing)
    assert '[label="f\\n5 s, <b>"' in to_dot(drawing)
    assert "<title>x → f (.a[0])</title>" in to_svg(drawing)
    assert ">5 s, &lt;b&gt;</text>" in to_svg(drawing)


def test_bodies_are_blocks_in_mermaid_and_dot() -> None:
    then = draw("then", "?q\n=result < q")
    drawing = draw("g", "?x\n!c:cond < x\n=result < c", ("c", then))
    expected = ['subgraph g1["then"]', 'n3(["q"])', 'n4(["result"])', "n3 --> n4", "end", "n1 -.-> g1"]
    assert [line.strip() for line in to_mermaid(drawing).splitlines()][-6:] == expected
    outlined = [line.strip() for line in to_mermaid(agent()).splitlines() if "subgraph" in line]
    titles = ("then", "otherwise", "while", "body", "then", "otherwise")
    assert outlined == [f'subgraph g{n}["{title}"]' for n, title in enumerate(titles, 1)]
    dot = to_dot(drawing)
    assert "subgraph cluster_1 {" in dot
    assert "n1 -> n3 [lhead=cluster_1, style=dotted];" in dot
    assert dot.count("{") == dot.count("}")


def test_what_only_waits_is_drawn_thin() -> None:
    def after(source: str) -> DrawnEdge:
        return DrawnEdge(source, "after", is_order=True)

    user = DrawnEdge("user")
    found = Drawing(
        "pay",
        (
            DrawnNode("user", "user", kind="input"),
            DrawnNode("check", "check", inputs=(user,)),
            DrawnNode("book", "book", inputs=(user, after("check"))),
            DrawnNode("result", "result", kind="output", inputs=(user, after("book"))),
        ),
    )
    assert to_text(found).splitlines()[2:] == [
        "○    user",
        "├─●  check",
        "├─●  book     ← user   after check",
        "◎╌╯  result   ← user   after book",
    ]
    assert 'n1 -.->|"after"| n2' in to_mermaid(found)
    assert 'n1 -> n2 [label="after", penwidth=0.4];' in to_dot(found)
    assert '<path class="edge order"' in to_svg(found)
