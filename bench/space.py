"""`python -m bench space [--to USER/NAME] [--docker]`: what a Hugging Face Space gets of this tree; sends it.

With --rehearse it runs here first (rehearsal.py).
Contract: without --to nothing is sent, and no network is needed. What git tracks is sent, as it is in the tree,
less the tests, what builds and checks, and .gitattributes, of which the Hub has its own; files that the Space has
besides are removed from it. Files go over HTTP, as the Hub takes no binary files by plain git. Claims hold what it
would refuse. Not run against the Hub.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import PurePosixPath
from typing import Any

from .report.report import CPU, ROOT, Row, claim, finish, parser

# The Hub's own file, which says what it stores as LFS.
THEIRS = ".gitattributes"
LEFT_OUT = ("tests/", ".ci/", ".github/", ".gitignore", ".dockerignore", "uv.lock", THEIRS)
# Most characters of a short_description.
DESCRIPTION = 60
PORT = 7860
MB = 1e6


def main(argv: list[str]) -> None:
    """List, check, and send if asked to."""
    options = parser("space", __doc__ or "")
    options.add_argument("--to", metavar="USER/NAME", help="send it to this Space, made where it is missing")
    options.add_argument("--docker", action="store_true", help="a Docker Space by the Dockerfile, no Gradio Space")
    options.add_argument("--rehearse", metavar="PYTHON", help="run it here as a Space would (bench/rehearsal.py)")
    options.add_argument("--installed", action="store_true", help="that Python has all that a Space installs")
    arguments = options.parse_args(argv)
    names = sent()
    if arguments.to and not re.fullmatch(r"[\w.-]+/[\w.-]+", arguments.to):
        options.error(f"--to takes USER/NAME; got {arguments.to!r}.")
    sizes = {name: (ROOT / name).stat().st_size for name in names}
    for name, size in sizes.items():
        print(f"{size:>12,}  {name}")
    counts = Counter(PurePosixPath(name).parts[0] if "/" in name else "." for name in names)
    rows: list[Row] = [
        {"folder": folder, "files": count, "mb": round(sum(_inside(sizes, folder)) / MB, 2)}
        for folder, count in sorted(counts.items())
    ]
    held = claims(names)
    if arguments.rehearse:
        from .rehearsal import rehearse

        rows, run = rehearse(arguments.rehearse, arguments.installed, names, configuration()["sdk_version"])
        held += run
    if arguments.to:
        print(f"Sent: {_send(arguments.to, names, arguments.docker)}", file=sys.stderr)
    else:
        print("Nothing was sent: name the Space with --to USER/NAME.", file=sys.stderr)
    finish("space", arguments, CPU, rows, held)


def sent() -> list[str]:
    """The files that a Space gets, by their paths in the tree. Ends the program where git does not know them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if listed.returncode:
        sys.exit("This folder is no clone of a git repository, so that it is not known what belongs to it.")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [name for name in names if not name.startswith(LEFT_OUT)]


def readme(docker: bool) -> str:
    """The README with the configuration of the Space; that of a Docker Space says so in place of Gradio."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if docker:
        text = re.sub(r"^(sdk_version|python_version|app_file): .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^sdk: gradio$", f"sdk: docker\napp_port: {PORT}", text, count=1, flags=re.MULTILINE)
    return text


def configuration(docker: bool = False) -> dict[str, str]:
    """The README's front matter, its lists left out."""
    _, front, _ = readme(docker).split("---\n", 2)
    return dict(re.findall(r"^(\w+): *(.+)$", front, re.MULTILINE))


def claims(names: list[str]) -> list[Row]:
    """What would be refused, or would not start."""
    found = configuration()
    needed = ("app.py", "requirements.txt", "Dockerfile", "drafts/smollm2/model.safetensors", "docs/usage.md")
    missing = sum(name not in names for name in needed)
    long = len(found["short_description"])
    allowed = f"gradio>={found['sdk_version'].rsplit('.', 1)[0]}"
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    other = not any(line.startswith(allowed) for line in lines)
    return [
        claim("files that the page needs and the Space lacks", missing, "0", not missing),
        claim("characters of short_description", long, f"{DESCRIPTION} at most", long <= DESCRIPTION),
        claim("versions of Gradio besides that of requirements.txt", int(other), "0", not other),
    ]


def _inside(sizes: dict[str, int], folder: str) -> list[int]:
    return [size for name, size in sizes.items() if (name.split("/")[0] if "/" in name else ".") == folder]


def _send(space: str, names: list[str], docker: bool) -> Any:
    """Make the Space where it is missing, and bring it to this tree's files in one commit; its address."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    hub = HfApi()
    hub.create_repo(space, repo_type="space", space_sdk="docker" if docker else "gradio", exist_ok=True)
    old = set(hub.list_repo_files(space, repo_type="space")) - {*names, THEIRS}
    content = {name: ROOT / name for name in names} | {"README.md": readme(docker).encode()}
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(name, file) for name, file in content.items()),
        *(CommitOperationDelete(name) for name in sorted(old)),
    ]
    made = hub.create_commit(space, operations, commit_message="Send the tree", repo_type="space")
    return made.commit_url
