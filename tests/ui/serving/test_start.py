"""What app.py refuses only after it has loaded a pair."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.test_app import start


def test_a_port_in_use_is_one_sentence_and_status_2(tiny_pair: tuple[Path, Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = start("--pair", str(tiny_pair[0]), "--host", "127.0.0.1", "--port", port)
    assert ended.returncode == 2 and ended.stdout == ""
    assert "Traceback" not in ended.stderr and f"port {port}" in ended.stderr.strip().splitlines()[-1]
