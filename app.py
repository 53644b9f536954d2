"""Start the page: read the options, load the models and serve.

Contract: every refusal is one sentence on stderr and exit status 2; options and the address to listen on are
checked before a model is loaded. Non-goals: what the page or the library does.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import gradio as gr

    from ui.sources.source import Service

# Libraries read these variables at import, so they are set before any library is imported.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# Number of past requests in Gradio's table; Gradio rebuilds it after each request, on the models' cores.
os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")
# Idle OpenMP threads sleep; spinning ones would take cores from the server and from a browser on this machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CONFLICT = "The installed package 'kernels' has the name of a folder here: run pip uninstall kernels first."
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
LOADING = "Loading; the address to open follows."
PROXIES = ("all_proxy", "http_proxy", "https_proxy")
# The largest numbers that are taken: of a port, of threads and rows (bass_core's), of anything else.
PORTS, THREADS, ROWS, MOST = 2**16 - 1, 2**10, 2**20, 2**31 - 1
# Gradio reads these as numbers when it is imported.
NUMBERS = ("GRADIO_SERVER_PORT", "GRADIO_NUM_PORTS")
# The exit status of a program that Ctrl-C ends.
INTERRUPTED = 130
USER, PASSWORD, REPLAY = "bass", "BASS_PASSWORD", "BASS_REPLAY"


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence, where argparse would print all options before it.

    As in bass_core/__main__.py, which can't be imported here: it brings torch before the options are read.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}; see {self.prog} --help.\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = Parser(
        prog="python app.py" if __name__ == "__main__" else "bass serve",
        description="Race regular, speculative and batched speculative decoding (BASS) side by side in a browser.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog=f"With the environment variable {PASSWORD} set, visitors log in as {USER!r} with its value.",
    )
    add = parser.add_argument
    add("--pair", default="smollm2", help="a pair's name, a Hub id, or a folder with the target model")
    add("--draft", help="a Hub id or a folder with the draft model, instead of the pair's own")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16; on a CPU int8, int4")
    add(
        "--device-map",
        choices=MAPS,
        help="spread a target that is larger than one GPU over all GPUs of this machine, by accelerate",
    )
    add(
        "--threads",
        type=whole(most=THREADS),
        help="threads of the models on a CPU; without it one for each core, less one for the browser where the "
        "page is served to this machine alone",
    )
    add("--host", help="address to listen on; 0.0.0.0 for every network of this machine")
    add("--port", type=whole(most=PORTS), help="port to listen on; without it the first free one from 7860")
    add(
        "--root-path",
        metavar="PATH",
        help="where a proxy in front of the page serves it, such as /bass; without it what GRADIO_ROOT_PATH says",
    )
    add(
        "--draft-length",
        choices=("auto", "cost-aware", "bass"),
        default="auto",
        help="of presets that name none: auto goes by what a round costs on this machine, which is measured while "
        "nothing runs; cost-aware measures all of that before the first race; bass is the paper's Algorithm 1",
    )
    add("--max-batch", type=whole(most=ROWS), default=32, help="largest batch that the page accepts")
    add("--max-new-tokens", type=whole(), default=1024, help="most new tokens a sequence")
    add("--max-prompt", type=whole(), default=20_000, help="most characters of a prompt")
    add("--max-seconds", type=whole(), default=600, help="longest time of one race")
    add(
        "--allow-any-model",
        action="store_true",
        help="let visitors name a pair, a Hub id or a folder of this machine, which is then loaded",
    )
    add(
        "--workers",
        type=whole(),
        metavar="N",
        help="run N races at once, on N workers of Ray: each has a GPU, or a share of the cores; needs "
        "requirements-ray.txt",
    )
    add("--ray", metavar="ADDRESS", help="run the workers on this Ray cluster; auto for the one on this machine")
    add(
        "--worker-resources",
        metavar="NAME=N,...",
        help="what each worker takes on a cluster, such as CPU=4; without it a GPU",
    )
    add("--share", action="store_true", help="also serve it at a public address of gradio.live")
    add(
        "--replay",
        nargs="?",
        const="",
        metavar="FILE",
        help="play a recorded race instead, and load no model: a file that the page saved, the name of one "
        f"that ships (win, loss, h100), or nothing for all of these; {REPLAY}, where no options can be given, is "
        "the same, 1 for all",
    )
    return parser.parse_args(arguments)


def replayed(option: str | None, environment: Mapping[str, str]) -> str | None:
    """What to replay: the option, else what the environment says; "" for all that ship, None for nothing."""
    if option is not None:
        return option
    asked = environment.get(REPLAY)
    return "" if asked == "1" else asked or None


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """The type of an option that takes a whole number from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}; got {text!r}")
        return value

    return read


def host(option: str | None, environment: Mapping[str, str]) -> str:
    """Address to listen on: the option, else GRADIO_SERVER_NAME, else all networks on a Space, else localhost."""
    if option:
        return option
    if environment.get("GRADIO_SERVER_NAME"):
        return environment["GRADIO_SERVER_NAME"]
    return "0.0.0.0" if "SPACE_ID" in environment else "127.0.0.1"


def unusable_address(options: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """The refusal of an address or a port that can't be listened on; None if it can."""
    for name in NUMBERS:
        try:
            whole(most=PORTS)(environment.get(name, "1"))
        except argparse.ArgumentTypeError as error:
            return f"{name} {error}: change it, or leave it out."
    address = host(options.host, environment)
    return None if _is_free(address, options.port) else _taken(address, options.port)


def _is_free(address: str, port: int | None) -> bool:
    """Whether the port can be listened on, at one of a name's addresses: localhost may name an unused IPv6 too."""
    free = False
    try:
        found = socket.getaddrinfo(address.strip("[]"), port or 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as tried:
                if os.name == "posix":  # as Gradio does: a page that has just ended keeps no port
                    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(place)
            free = True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return free


def _taken(address: str, port: int | None) -> str:
    return (
        f"Cannot listen on {address}, port {port or '7860 or later'}: it is in use, not allowed to this "
        "user, or not an address of this machine; choose another with --port or --host."
    )


def exempt(address: str, environment: MutableMapping[str, str]) -> None:
    """Let no request to this machine go through a proxy: Gradio asks the page's own address once it is up.

    What goes elsewhere, as the download of a model does, keeps the proxy. The lower-case variable counts first.
    """
    named = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if named.strip() != "*":
        known = [one.strip() for one in named.split(",") if one.strip()]
        own = [one for one in ("localhost", "127.0.0.1", "::1", address) if one not in known]
        environment["no_proxy"] = environment["NO_PROXY"] = ",".join([*known, *own])


def unusable_proxy() -> str | None:
    """The refusal of a proxy that httpx can't use, with which Gradio and the Hub's client ask; None if it can."""
    error = _refused_proxy()
    if error is None:
        return None
    exempted = {name: os.environ.pop(name) for name in list(os.environ) if name.lower() == "no_proxy"}
    try:
        if exempted and _refused_proxy() is None:
            return f"The hosts that {' or '.join(exempted)} names can't be used: {_reason(error)}"
    finally:
        os.environ.update(exempted)
    named = [name for name in os.environ if name.lower() in PROXIES]
    which = f"The proxy that {' or '.join(named)} names" if named else "The system's proxy"
    return f"{which} can't be used: {_reason(error)}"


def _refused_proxy() -> Exception | None:
    """Why httpx makes no client of these variables and the system's settings; None if it does."""
    import httpx

    try:
        httpx.Client(verify=False).close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        return error
    return None


def _reason(error: BaseException) -> str:
    """An error of a library as one sentence."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if said.endswith(".") else f"{said}."


def leaves_a_core(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Whether the models leave one core free for a browser on this machine.

    They do if the page is served to this machine alone and nobody sets the number of threads.
    """
    local = host(options.host, environment) in ("127.0.0.1", "localhost", "::1")
    return local and not options.share and options.threads is None and "OMP_NUM_THREADS" not in environment


def keep_to_quota(environment: Mapping[str, str]) -> None:
    """Set torch to no more threads than cores: it counts those of the machine, whatever a container may use."""
    import torch

    from bass_core.machine.cpu import cores

    if "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(min(torch.get_num_threads(), cores()))


def spare_forks() -> None:
    """Give a forked worker, such as ZeroGPU's, one thread of torch.

    GNU's OpenMP would wait there for threads that only this process has.
    """
    import torch

    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def set_threads(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Set the number of the models' threads on a CPU, and return it.

    Sharing a core with a browser costs the models more than giving that core up: on two cores, two threads beside
    a browser are no faster than one thread (python -m bench page).
    """
    import torch

    from bass_core.machine.cpu import cores

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    elif leaves_a_core(options, environment):
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores() - 1)))
    return torch.get_num_threads()


def credentials(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The user and password that the page asks for; None (an open page) if no password is set."""
    password = environment.get(PASSWORD)
    return (USER, password) if password else None


def conflict() -> str | None:
    """The refusal if the package kernels is installed: transformers would import our folder instead. Else None.

    An installed page has no folder of that name (setup.py).
    """
    if __name__ == "bass_core.app":
        return None
    try:
        metadata.distribution("kernels")
    except metadata.PackageNotFoundError:
        return None
    return CONFLICT


def serve(options: argparse.Namespace) -> None:
    """Serve the page, with a pair or a recording, until interrupted; raises BassError."""
    options.replay = replayed(options.replay, os.environ)
    if options.replay is not None:
        page, about = replay_page(options)
        launch(page, about, options)
    else:
        from ui.page.early import EarlyPage

        early = EarlyPage(lambda page: opened_at(page, options), share=options.share)
        page, service = race_page(options, early)
        options.port = options.port or early.port
        try:
            launch(page, service.facts.about, options, service.at_once, service.opened)
        finally:
            service.close()


def race_page(
    options: argparse.Namespace, early: AbstractContextManager[object] | None = None
) -> tuple[gr.Blocks, Service]:
    """Returns the page for a pair, and what runs its races.

    early: entered while that is prepared, and left before the page is built, since Gradio builds one at a time.
    """
    from bass_core import on_zero_gpu
    from bass_core.machine.cpu import cores
    from ui.page.limits import Limits
    from ui.page.page import build
    from ui.sources.service import open_service
    from ui.sources.source import Ask

    asked = Ask(
        options.pair,
        options.draft,
        options.device,
        options.dtype,
        options.draft_length,
        options.max_batch,
        options.allow_any_model,
        device_map=options.device_map,
        measures=options.draft_length != "bass",
    )
    limits = Limits(options.max_batch, options.max_new_tokens, options.max_prompt, options.max_seconds)
    free = cores() - leaves_a_core(options, os.environ)
    keep_to_quota(os.environ)
    if on_zero_gpu():
        spare_forks()
    with early or nullcontext():
        service = open_service(asked, options, limits, lambda: set_threads(options, os.environ), free)
    facts = service.facts
    page = build(
        service.source,
        limits=limits,
        about=facts.about,
        choices=facts.choices,
        pair=facts.pair,
        count=service.count,
        at_once=service.at_once,
        together=service.together,
    )
    return page, service


def replay_page(options: argparse.Namespace) -> tuple[gr.Blocks, str]:
    """Returns the page for recordings, and a description of them."""
    from ui.page.limits import Limits
    from ui.page.page import build
    from ui.recordings.shelf import asked

    offers = asked(options.replay)
    first = next(iter(offers.values())).recording["about"]
    about = f"a recording: {first}" if len(offers) == 1 else f"recordings: {', '.join(offers)}"
    return build(None, limits=Limits(), about=first if len(offers) == 1 else "", offers=offers), about


def opened_at(page: gr.Blocks, options: argparse.Namespace, at_once: int = 1) -> tuple[str, str | None]:
    """Serve the page in a thread; returns its address and its public one. Raises BassError where it can't be."""
    from bass_core import BassError
    from ui.page.page import launch_options

    address = host(options.host, os.environ)
    try:
        _, url, public = page.launch(
            server_name=address,
            server_port=options.port,
            root_path=options.root_path,
            share=options.share,
            auth=credentials(os.environ),
            prevent_thread_lock=True,
            quiet=True,
            **launch_options(at_once),
        )
    except OSError as error:
        raise BassError(_taken(address, options.port)) from error
    except Exception as error:  # Gradio raises many kinds, Exception itself among them
        raise BassError(f"The page could not be opened on {address}: {_reason(error)}") from error
    return url, public


def launch(
    page: gr.Blocks,
    about: str,
    options: argparse.Namespace,
    at_once: int = 1,
    opened: Callable[[], None] = lambda: None,
) -> None:
    """Serve until interrupted; call `opened` once the page is up. Raises BassError where it can't be served."""
    url, public = opened_at(page, options, at_once)
    print(f"BASS races {about}: open {url}" + (f" or {public}" if public else ""), flush=True)
    opened()
    page.block_thread()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    options = parse(arguments)
    for stream in (sys.stdout, sys.stderr):
        # A console may lack the characters of a folder's name.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    exempt(host(options.host, os.environ), os.environ)
    refusal = conflict() or unusable_proxy() or unusable_address(options, os.environ)
    if refusal is None:
        # Printed first: importing torch and transformers takes seconds.
        print(LOADING, file=sys.stderr, flush=True)
        from bass_core import BassError

        try:
            serve(options)
        except KeyboardInterrupt:  # while it loads: a page that is up ends by itself
            return INTERRUPTED
        except BassError as error:
            refusal = str(error)
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
