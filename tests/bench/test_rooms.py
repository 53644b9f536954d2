"""The import diagram: what counts as an import, which floor a box is on, and which arrows are drawn."""

import json
from xml.etree import ElementTree

from bench.report import rooms

TREE = {
    "bass_core/__init__.py": "from .lanes.race import race\n\n",
    "bass_core/errors.py": "import math\n\nclass BassError(Exception): ...\n",
    "bass_core/lanes/__init__.py": '"""Lanes."""\n',
    "bass_core/lanes/race.py": "from ..decode import batch\nfrom .. import errors\nfrom .lane import Lane\n",
    "bass_core/lanes/lane.py": "from ..decode.batch import decode\nimport torch\n",
    "bass_core/decode/batch.py": "from ..errors import BassError\n\nimport kernels.plan\n",
    "kernels/plan.py": "import torch\n\n",
    "ui/page.py": "from bass_core import race\n\n",
}


def test_imports_are_counted_between_rooms():
    files, arrows = rooms.rooms(rooms.modules(TREE))
    assert files["lanes"] == ["bass_core.lanes.race", "bass_core.lanes.lane"]
    assert arrows["lanes", "decode"] == 2 and arrows["lanes", "errors"] == 1
    assert arrows["decode", "kernels"] == 1 and ("kernels", "decode") not in arrows


def test_a_box_stands_above_what_it_points_to_and_circles_share_a_floor():
    arrows = {("a", "b"): 1, ("b", "c"): 1, ("c", "b"): 1, ("c", "d"): 1, ("a", "d"): 1}
    assert rooms.circles(arrows) == [{"b", "c"}]
    assert rooms.floors_of(["a", "b", "c", "d", "e"], arrows) == {"a": 2, "b": 1, "c": 1, "d": 0, "e": 0}


def test_an_arrow_that_follows_is_left_out_and_nothing_else():
    arrows = {("a", "b"): 1, ("b", "c"): 1, ("a", "c"): 1, ("c", "b"): 1, ("c", "d"): 1, ("b", "d"): 1}
    kept = rooms.needed(arrows)
    assert ("b", "c") in kept and ("c", "b") in kept
    assert all(rooms.reach(name, dict.fromkeys(kept, 1)) == rooms.reach(name, arrows) for name in "abcd")
    assert len(kept) == 4


def test_the_picture_is_an_svg_with_each_box(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rooms, "sources", lambda revision: TREE)
    rooms.main(["--out", str(tmp_path / "rooms.svg")])
    drawn = ElementTree.parse(tmp_path / "rooms.svg")
    texts = {node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"lanes", "decode", "errors", "public names", "kernels", "ui"} <= texts
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert (row["files"], row["circles of files"], row["fullest"]) == (4, 0, 3)  # lanes: race, lane and __init__
