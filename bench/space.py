"""`python -m bench space [--to USER/NAME] [--docker]`: list, and send, this tree's files for a Hugging Face Space.

`--static FOLDER` writes a Space that runs no Python instead: recorded races, the slider over readers and "How it
works". Any static host serves it. With `--name USER/NAME`, the README links to that Space.

Without --to it sends nothing and needs no network. It sends the files that git tracks, as they are in the tree,
except for tests, build and CI files, and .gitattributes (the Hub has its own version of that file). Other files of
the Space are removed. Files go over HTTP, because the Hub takes no binary files by plain git. The claims check for
content that the Hub would refuse. This was never run against the Hub.
"""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from ui.recordings.webpage import static_space

from .report.report import CPU, ROOT, Row, at_most, claim, finish, parser

# The Hub's own version of this file lists the files that it stores as LFS.
THEIRS = ".gitattributes"
LEFT_OUT = ("tests/", ".ci/", ".github/", ".gitignore", ".dockerignore", "uv.lock", THEIRS)
# The longest short_description, in characters.
DESCRIPTION = 60
PORT = 7860
MB = 1e6
# The largest static Space.
STATIC_MB = 10
README = ROOT / "README.md"


def main(argv: list[str]) -> None:
    """List, check, and send if asked to."""
    options = parser("space", __doc__ or "")
    options.add_argument("--to", metavar="USER/NAME", help="send the files to this Space, created if necessary")
    options.add_argument("--docker", action="store_true", help="a Docker Space, not a Gradio Space")
    options.add_argument("--static", type=Path, metavar="FOLDER", help="write a static Space to this folder")
    options.add_argument("--name", metavar="USER/NAME", help="with --static: let the README link to this Space")
    arguments = options.parse_args(argv)
    for name in filter(None, (arguments.to, arguments.name)):
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            options.error(f"a Space is named USER/NAME; got {name!r}.")
    if (arguments.name and not arguments.static) or (arguments.static and arguments.to):
        options.error("--name goes with --static, and --static writes a folder and sends nothing.")
    if arguments.static:
        return _static(arguments)
    names = sent()
    sizes = {name: (ROOT / name).stat().st_size for name in names}
    for name, size in sizes.items():
        print(f"{size:>12,}  {name}")
    counts = Counter(PurePosixPath(name).parts[0] if "/" in name else "." for name in names)
    rows: list[Row] = [
        {"folder": folder, "files": count, "mb": round(sum(_inside(sizes, folder)) / MB, 2)}
        for folder, count in sorted(counts.items())
    ]
    if arguments.to:
        print(f"Sent: {_send(arguments.to, names, arguments.docker)}", file=sys.stderr)
    else:
        print("Nothing was sent: name the Space with --to USER/NAME.", file=sys.stderr)
    finish("space", arguments, CPU, rows, claims(names))


def _static(arguments: Namespace) -> None:
    """Write the static Space, and the link to it."""
    files = static_space(arguments.static)
    if arguments.name:
        text = README.read_text(encoding="utf-8")
        README.write_text(linked(text, arguments.name), encoding="utf-8")
    rows: list[Row] = [{"file": file.name, "mb": round(file.stat().st_size / MB, 2)} for file in files]
    size = sum(file.stat().st_size for file in files)
    finish("space", arguments, CPU, rows, [at_most("MB of the static Space", size / MB, STATIC_MB)])


def linked(text: str, name: str) -> str:
    """Return the README with a link to this static Space."""
    link = f"[Watch it in your browser](https://huggingface.co/spaces/{name}), with nothing to install."
    return re.sub(r"<!-- space -->.*", f"<!-- space --> {link}", text, count=1)


def sent() -> list[str]:
    """Return the files that a Space gets, by their paths in the tree.

    Raises:
        SystemExit: if the tree is not a git repository.
    """
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if listed.returncode:
        sys.exit("This folder is not a git repository, so we don't know which files to send: run it in a clone.")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [name for name in names if not name.startswith(LEFT_OUT)]


def readme(docker: bool) -> str:
    """Return the README with the Space's configuration in its front matter, of a Gradio or a Docker Space."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if docker:
        text = re.sub(r"^(sdk_version|python_version|app_file): .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^sdk: gradio$", f"sdk: docker\napp_port: {PORT}", text, count=1, flags=re.MULTILINE)
    return text


def configuration(docker: bool = False) -> dict[str, str]:
    """Return the README's front matter, without its lists."""
    _, front, _ = readme(docker).split("---\n", 2)
    return dict(re.findall(r"^(\w+): *(.+)$", front, re.MULTILINE))


def claims(names: list[str]) -> list[Row]:
    """Return the claims: nothing that the Hub would refuse, and everything that the page needs to start."""
    settings = configuration()
    needed = ("app.py", "requirements.txt", "Dockerfile", "drafts/smollm2/model.safetensors", "docs/usage.md")
    missing = sum(name not in names for name in needed)
    long = len(settings["short_description"])
    allowed = f"gradio>={settings['sdk_version'].rsplit('.', 1)[0]}"
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
    """Create the Space if necessary, commit this tree's files to it, and return the commit's address."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    hub = HfApi()
    hub.create_repo(space, repo_type="space", space_sdk="docker" if docker else "gradio", exist_ok=True)
    old = set(hub.list_repo_files(space, repo_type="space")) - {*names, THEIRS}
    content = {name: ROOT / name for name in names} | {"README.md": readme(docker).encode()}
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(name, file) for name, file in content.items()),
        *(CommitOperationDelete(name) for name in sorted(old)),
    ]
    commit = hub.create_commit(space, operations, commit_message="Send the tree", repo_type="space")
    return commit.commit_url
