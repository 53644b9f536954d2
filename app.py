"""Start the page: `main` reads the options, loads the models and serves.

Every refusal is one sentence on stderr and exit status 2. Options and the address to listen on are checked before
a model is loaded.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from importlib import metadata
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import gradio as gr

    from ui.page.limits import Limits
    from ui.page.server import PageServer
    from ui.sources.source import Service

# Libraries read these variables at import, so they are set before any library is imported.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# Limit Gradio's table of past requests: Gradio rebuilds all of it after each request, on cores that the models
# need.
os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")
# Let idle OpenMP threads sleep: spinning ones would take cores from the server and from a browser on this machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CONFLICT = "The installed package 'kernels' has the name of a folder here: run pip uninstall kernels first."
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
LOADING = "Loading; open {} now, and the page appears as soon as it is ready."
# "auto" is "smollm2" on a CPU.
DEFAULT_PAIR, ON_CPU = "auto", ("auto", "smollm2")
# Paths that exist if a driver for GPUs is there: NVIDIA's, AMD's, and that of Windows below its Linux.
GPU_DRIVERS = ("/proc/driver/nvidia", "/dev/kfd", "/dev/dxg")
PROXIES = ("all_proxy", "http_proxy", "https_proxy")
# Upper limits of the options: a port, threads and rows (the same limits as in bass_core), and any other number.
MAX_PORT, MAX_THREADS, MAX_ROWS, MAX_NUMBER = 2**16 - 1, 2**10, 2**20, 2**31 - 1
# Gradio parses these variables as numbers when it is imported.
NUMBERS = ("GRADIO_SERVER_PORT", "GRADIO_NUM_PORTS")
# The exit status of a program that Ctrl-C ends.
INTERRUPTED = 130
USER, PASSWORD, REPLAY = "bass", "BASS_PASSWORD", "BASS_REPLAY"


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses in one sentence, without printing all options first.

    It is a copy of the class in bass_core/__main__.py: importing that module would import torch before the options
    are read.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}; see {self.prog} --help.\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = Parser(
        prog="python app.py" if __name__ == "__main__" else "bass serve",
        description="Race regular, speculative and batched speculative decoding (BASS) side by side in a browser.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog=f"With the environment variable {PASSWORD} set, visitors log in as {USER!r} with its value.",
    )
    add = parser.add_argument
    add(
        "--pair",
        default=DEFAULT_PAIR,
        help="a pair's name, a Hub id, a folder with the target model, or "
        "auto: on a GPU the largest pair that is downloaded and fits, else smollm2",
    )
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
        type=whole(most=MAX_THREADS),
        help="the models' threads on a CPU; if omitted, one per core, minus one for the browser if only this "
        "machine can open the page",
    )
    add("--host", help="address to listen on; 0.0.0.0 for every network of this machine")
    add("--port", type=whole(most=MAX_PORT), help="port to listen on; if omitted, the first free one from 7860")
    add(
        "--root-path",
        metavar="PATH",
        help="path at which a proxy serves the page, such as /bass; if omitted, GRADIO_ROOT_PATH",
    )
    add(
        "--draft-length",
        choices=("auto", "cost-aware", "bass"),
        default="auto",
        help="for presets without one: auto uses the cost of a round on this machine, measured between races; "
        "cost-aware measures all costs before the first race; bass is the paper's Algorithm 1",
    )
    add("--max-batch", type=whole(most=MAX_ROWS), default=32, help="largest batch that the page accepts")
    add("--max-new-tokens", type=whole(), default=1024, help="most new tokens per sequence")
    add("--max-prompt", type=whole(), default=20_000, help="longest prompt, in characters")
    add("--max-seconds", type=whole(), default=600, help="time limit of a race")
    add(
        "--allow-any-model",
        action="store_true",
        help="let visitors load any pair, Hub id or folder of this machine",
    )
    add(
        "--workers",
        type=whole(),
        metavar="N",
        help="run N races at once on N Ray workers, each with a GPU or a share of the cores; needs "
        "requirements-ray.txt",
    )
    add("--ray", metavar="ADDRESS", help="run the workers on this Ray cluster; auto for the one on this machine")
    add(
        "--worker-resources",
        metavar="NAME=N,...",
        help="resources of each worker on a cluster, such as CPU=4; if omitted, a GPU",
    )
    add("--share", action="store_true", help="also serve it at a public address of gradio.live")
    add(
        "--replay",
        nargs="?",
        const="",
        metavar="FILE",
        help="replay a recorded race and load no model: a file saved by the page, the name of a shipped recording "
        f"(win, loss, h100, h200, one), or nothing for all of those; the variable {REPLAY} does the same without "
        "an option, 1 for all",
    )
    return parser.parse_args(arguments)


def replayed(option: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the recording to replay, from the option or else the environment; "" means all shipped ones."""
    if option is not None:
        return option
    variable = environment.get(REPLAY)
    return "" if variable == "1" else variable or None


def whole(least: int = 1, most: int = MAX_NUMBER) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number from `least` to `most`."""

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
    """Return the address to listen on.

    That is the option, else GRADIO_SERVER_NAME, else all networks on a Space and localhost elsewhere.
    """
    if option:
        return option
    if environment.get("GRADIO_SERVER_NAME"):
        return environment["GRADIO_SERVER_NAME"]
    return "0.0.0.0" if "SPACE_ID" in environment else "127.0.0.1"


def unusable_number(environment: Mapping[str, str]) -> str | None:
    """Return an error message if a variable of NUMBERS is no port or number of ports, else None."""
    for name in NUMBERS:
        try:
            whole(most=MAX_PORT)(environment.get(name, "1"))
        except argparse.ArgumentTypeError as error:
            return f"{name} {error}: change it, or leave it out."
    return None


def ports(option: int | None, environment: Mapping[str, str]) -> range:
    """Return the ports to try: only the option's, or else those that Gradio would try."""
    first = option or int(environment.get("GRADIO_SERVER_PORT", "7860"))
    count = 1 if option else int(environment.get("GRADIO_NUM_PORTS", "100"))
    return range(first, min(first + count, MAX_PORT + 1))


def _taken(address: str, tried: range) -> str:
    port = f"{tried[0]}" if len(tried) == 1 else f"{tried[0]} or later"
    return (
        f"Cannot listen on {address}, port {port}: it is in use, not allowed for this "
        "user, or not an address of this machine; choose another with --port or --host."
    )


def exempt(address: str, environment: MutableMapping[str, str]) -> None:
    """Exempt this machine from proxies, because Gradio requests the page's own address once the page is up.

    Other requests, for example the download of a model, still use the proxy. no_proxy overrides NO_PROXY.
    """
    value = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if value.strip() != "*":
        exempted = [name.strip() for name in value.split(",") if name.strip()]
        local = [name for name in ("localhost", "127.0.0.1", "::1", address) if name not in exempted]
        environment["no_proxy"] = environment["NO_PROXY"] = ",".join([*exempted, *local])


def unusable_proxy() -> str | None:
    """Return an error message if httpx, the client of Gradio and the Hub, can't use the proxy; else None."""
    error = _proxy_error()
    if error is None:
        return None
    exempted = {name: os.environ.pop(name) for name in list(os.environ) if name.lower() == "no_proxy"}
    try:
        if exempted and _proxy_error() is None:
            return f"The hosts that {' or '.join(exempted)} names can't be used: {_reason(error)}"
    finally:
        os.environ.update(exempted)
    named = [name for name in os.environ if name.lower() in PROXIES]
    which = f"The proxy that {' or '.join(named)} names" if named else "The system's proxy"
    return f"{which} can't be used: {_reason(error)}"


def _proxy_error() -> Exception | None:
    """Return httpx's error for the proxy variables and the system's settings, or None."""
    import httpx

    try:
        httpx.Client(verify=False).close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        return error
    return None


def _reason(error: BaseException) -> str:
    """Return a library's error as one sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else f"{text}."


def leaves_a_core(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Return whether the models leave one core free for a browser on this machine.

    The models leave one free if only this machine can open the page and nobody has set the number of threads.
    """
    local = host(options.host, environment) in ("127.0.0.1", "localhost", "::1")
    return local and not options.share and options.threads is None and "OMP_NUM_THREADS" not in environment


def keep_to_quota(environment: Mapping[str, str]) -> None:
    """Limit torch's threads to the cores of this container; torch itself counts those of the machine."""
    import torch

    from bass_core.machine.cpu import cores

    if "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(min(torch.get_num_threads(), cores()))


def set_threads(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Set and return the number of the models' threads on a CPU.

    Sharing a core with a browser costs the models more than giving that core up. For example, on two cores, two
    threads next to a browser are no faster than one thread (python -m bench page).
    """
    import torch

    from bass_core.machine.cpu import cores

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    elif leaves_a_core(options, environment):
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores() - 1)))
    return torch.get_num_threads()


def credentials(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the user and password that the page asks for, or None (an open page) if no password is set."""
    password = environment.get(PASSWORD)
    return (USER, password) if password else None


def conflict() -> str | None:
    """Return an error message if the package `kernels` is installed, else None.

    transformers would import our folder `kernels` instead of it. If the page is installed, there is no such folder
    (setup.py).
    """
    if __name__ == "bass_core.app":
        return None
    try:
        metadata.distribution("kernels")
    except metadata.PackageNotFoundError:
        return None
    return CONFLICT


def on_cpu(options: argparse.Namespace) -> bool:
    """Return whether the models surely run on a CPU. It is asked before torch is imported."""
    gpu = sys.platform == "win32" or any(map(os.path.exists, GPU_DRIVERS))
    return options.device == "cpu" or (options.device == "auto" and not gpu)


def pair_name(options: argparse.Namespace) -> str:
    """Return the name of the pair that is about to be loaded, or "" if that depends on the GPU."""
    from ui.sources.local import shown_name

    if options.pair != DEFAULT_PAIR:
        return shown_name(options.pair)
    return ON_CPU[1] if on_cpu(options) and not options.ray else ""


def compile_ahead(options: argparse.Namespace) -> None:
    """Start to compile the CPU's kernels for the default pair, before the imports of torch and transformers.

    Other pairs start it when they are loaded (load_pair), and so does the default one if it may run on a GPU.
    """
    here = not (options.workers or options.ray or replayed(options.replay, os.environ) is not None)
    if here and options.pair in ON_CPU and on_cpu(options):
        with suppress(Exception):  # load_pair explains why the kernels can't be used
            from kernels.cpu.calls import compilers

            compilers.start("bfloat16" if options.dtype == "auto" else options.dtype)


def serve(options: argparse.Namespace, server: PageServer) -> None:
    """Serve the page, with a pair or a recording, until interrupted.

    Raises:
        BassError: if the models can't be loaded, the recording can't be read or the page can't be served.
    """
    options.replay = replayed(options.replay, os.environ)
    if options.replay is not None:
        page, about = replay_page(options)
        announce(about, opened_at(server, page, options))
        page.block_thread()
        return
    from ui.page.early import EarlyPage

    with ExitStack() as stack:
        limits, name = operators_limits(options), pair_name(options)
        with EarlyPage(lambda page: opened_at(server, page, options), name=name, limits=limits) as early:
            page, service = race_page(options, early.settle)
            stack.callback(service.close)
            addresses = opened_at(server, page, options, service.at_once)
        announce(service.facts.about, addresses)
        service.opened()
        page.block_thread()


def operators_limits(options: argparse.Namespace) -> Limits:
    """Return the upper bounds that the options set."""
    from ui.page.limits import Limits

    return Limits(options.max_batch, options.max_new_tokens, options.max_prompt, options.max_seconds)


def race_page(
    options: argparse.Namespace, prepared: Callable[[], None] = lambda: None
) -> tuple[gr.Blocks, Service]:
    """Return the page for a pair, and the service that runs its races.

    Args:
        prepared: called once the service is ready, before we build the page: Gradio builds one page at a time.
    """
    from bass_core.machine.cpu import cores
    from ui.page.page import build
    from ui.sources.service import open_service
    from ui.sources.source import PairOptions

    ask = PairOptions(
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
    limits = operators_limits(options)
    free = cores() - leaves_a_core(options, os.environ)
    keep_to_quota(os.environ)
    service = open_service(ask, options, limits, lambda: set_threads(options, os.environ), free)
    prepared()
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
        advice=facts.advice,
    )
    return page, service


def replay_page(options: argparse.Namespace) -> tuple[gr.Blocks, str]:
    """Return the page for recordings, and a description of them."""
    from ui.page.limits import Limits
    from ui.page.page import build
    from ui.recordings.shelf import requested_recordings

    offers = requested_recordings(options.replay)
    first = next(iter(offers.values())).recording["about"]
    about = f"a recording: {first}" if len(offers) == 1 else f"recordings: {', '.join(offers)}"
    return build(None, limits=Limits(), about=first if len(offers) == 1 else "", offers=offers), about


def opened_at(
    server: PageServer, page: gr.Blocks, options: argparse.Namespace, at_once: int = 1
) -> tuple[str, str | None]:
    """Show the page on the server; return its local address, and its public one or None.

    Raises:
        BassError: if the page can't be served.
    """
    from bass_core import BassError
    from ui.page.page import launch_options

    try:
        return server.open(
            page,
            root_path=options.root_path,
            share=options.share,
            auth=credentials(os.environ),
            **launch_options(at_once),
        )
    except Exception as error:  # Gradio raises many kinds, Exception itself among them
        raise BassError(f"The page could not be opened on {server.address}: {_reason(error)}") from error


def announce(about: str, addresses: tuple[str, str | None]) -> None:
    """Print where the page is, and look for garbage again, but not among the objects that are in use by now.

    Also let Python switch threads sooner.
    """
    # After each kernel a lane's thread needs the interpreter's lock again. Next to a thread that always computes,
    # a round of 28 ms took 315 ms with Python's default of 5 ms, and 58 ms with this (2-core AMD EPYC, one row).
    # Next to one that computes a fifth of the time, it took 28 ms with both.
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
    gc.enable()
    url, public = addresses
    print(f"BASS races {about}: open {url}" + (f" or {public}" if public else ""), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    options = parse(arguments)
    for stream in (sys.stdout, sys.stderr):
        # The console may be unable to print the characters of a folder's name.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    address = host(options.host, os.environ)
    exempt(address, os.environ)
    refusal = conflict() or unusable_proxy() or unusable_number(os.environ)
    if refusal is None:
        from ui.page.server import PageServer, bind

        tried = ports(options.port, os.environ)
        sockets = bind(address, tried)
        refusal = None if sockets else _taken(address, tried)
    if refusal is None:
        try:
            with PageServer(sockets, address) as server:
                # Print this first: importing torch and transformers takes seconds.
                print(LOADING.format(server.url), file=sys.stderr, flush=True)
                compile_ahead(options)
                # Looking for garbage takes a sixth of the imports' time. It is on again when the page is up.
                gc.disable()
                from bass_core import BassError

                try:
                    serve(options, server)
                except BassError as error:
                    refusal = str(error)
        except KeyboardInterrupt:  # while loading; once the page is up, Gradio handles Ctrl-C
            return INTERRUPTED
        finally:
            gc.enable()
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
