"""Start the page: read the options, load the models and serve.

Contract: every refusal is one sentence on stderr and exit status 2. Non-goals: what the page or the library does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bass_core import ModelPair
    from ui.sources.idle import IdleWork

# Libraries read these variables at import, so they are set before any library is imported.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# Number of past requests in Gradio's table; Gradio rebuilds it after each request, on the models' cores.
os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")
# Idle OpenMP threads sleep; spinning ones would take cores from the server and from a browser on this machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


CONFLICT = "The installed package 'kernels' has the name of a folder here: run pip uninstall kernels first."
LOADING = "Loading; the address to open follows."
USER, PASSWORD, REPLAY = "bass", "BASS_PASSWORD", "BASS_REPLAY"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description="Race regular, speculative and batched speculative decoding (BASS) side by side in a browser.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog=f"With the environment variable {PASSWORD} set, visitors log in as {USER!r} with its value.",
    )
    parser.add_argument(
        "--pair", default="smollm2", help="a pair's name, a Hub id, or a folder with the target model"
    )
    parser.add_argument("--draft", help="a Hub id or a folder with the draft model, instead of the pair's own")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16, int8, or int4 on a CPU")
    parser.add_argument(
        "--threads",
        type=_positive,
        help="threads of the models on a CPU; without it one for each core, less one for the browser where the "
        "page is served to this machine alone",
    )
    parser.add_argument("--host", help="address to listen on; 0.0.0.0 for every network of this machine")
    parser.add_argument("--port", type=int, help="port to listen on; without it the first free one from 7860")
    parser.add_argument(
        "--draft-length",
        choices=("auto", "budget", "cost-aware", "bass"),
        default="auto",
        help="what the page starts with: auto goes by what a round costs on this machine, which is measured while "
        "nothing runs; budget and cost-aware measure all of that before the first race, one to plan trees and "
        "chains, one for a length of chains alone; bass is the paper's Algorithm 1",
    )
    parser.add_argument("--max-batch", type=_positive, default=32, help="largest batch that the page accepts")
    parser.add_argument("--max-new-tokens", type=_positive, default=1024, help="most new tokens a sequence")
    parser.add_argument("--max-prompt", type=_positive, default=20_000, help="most characters of a prompt")
    parser.add_argument("--max-seconds", type=_positive, default=600, help="longest time of one race")
    parser.add_argument(
        "--allow-any-model",
        action="store_true",
        help="let visitors name a pair, a Hub id or a folder of this machine, which is then loaded",
    )
    parser.add_argument("--share", action="store_true", help="also serve it at a public address of gradio.live")
    parser.add_argument(
        "--replay",
        nargs="?",
        const="",
        metavar="FILE",
        help="play a recorded race instead, and load no model: a file that the page saved or exported, the name "
        f"of one that ships (win, loss, h100), or nothing for all of these; {REPLAY}, where no options can be "
        "given, is the same, 1 for all",
    )
    return parser.parse_args(arguments)


def replayed(option: str | None, environment: Mapping[str, str]) -> str | None:
    """What to replay: the option, else what the environment says; "" for all that ship, None for nothing."""
    if option is not None:
        return option
    asked = environment.get(REPLAY)
    return "" if asked == "1" else asked or None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def host(option: str | None, environment: Mapping[str, str]) -> str:
    """Address to listen on: the option, else GRADIO_SERVER_NAME, else all networks on a Space, else localhost."""
    if option:
        return option
    if environment.get("GRADIO_SERVER_NAME"):
        return environment["GRADIO_SERVER_NAME"]
    return "0.0.0.0" if "SPACE_ID" in environment else "127.0.0.1"


def leaves_a_core(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Whether the models leave one core free for a browser on this machine.

    They do if the page is served to this machine alone and nobody sets the number of threads.
    """
    local = host(options.host, environment) in ("127.0.0.1", "localhost", "::1")
    return local and not options.share and options.threads is None and "OMP_NUM_THREADS" not in environment


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
    """The refusal if the package kernels is installed: transformers would import our folder instead. Else None."""
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
        page, about, work = race_page(options)
        launch(page, about, options, opened=work.start)


def race_page(options: argparse.Namespace) -> tuple[Any, str, IdleWork]:
    """Returns the page for a loaded pair, a description of the pair, and the work to do while no race runs."""
    try:
        import spaces  # ZeroGPU: must be imported before torch
    except ImportError:
        spaces = None
    from bass_core import load_pair, may_measure, measure_ahead
    from ui.page.choices import choices
    from ui.page.events import race_source
    from ui.page.limits import Limits
    from ui.page.page import build
    from ui.page.prompt_length import prompt_count
    from ui.sources.idle import IdleWork
    from ui.sources.models import Models

    def load(name: str) -> ModelPair:
        return load_pair(name, device=options.device, dtype=options.dtype)

    pair = load_pair(options.pair, draft=options.draft, device=options.device, dtype=options.dtype)
    # Set after loading, because loading lays out the weights on all cores.
    threads = set_threads(options, os.environ)
    source = race_source(pair, Models(pair, load if options.allow_any_model else None))

    def refine() -> Generator[None, None, None]:
        # Between races, a ZeroGPU Space has no device to measure on.
        if spaces is None and may_measure() and options.draft_length != "bass":
            yield from measure_ahead(pair, options.max_batch)

    work = IdleWork(refine)
    source = work.beside(source) if spaces is None else spaces.GPU(duration=gpu_seconds)(source)
    about = described(pair, options.pair, threads)
    limits = Limits(options.max_batch, options.max_new_tokens, options.max_prompt, options.max_seconds)
    page = build(
        source,
        limits=limits,
        about=about,
        choices=choices(pair, options.draft_length),
        pair=load_arguments(pair, options.pair, options.draft),
        count=prompt_count(pair, limits),
    )
    return page, about, work


def described(pair: ModelPair, name: str, threads: int) -> str:
    """Which models run where, in words; `name` is what load_pair was given."""
    about = f"{shown_name(pair.name or name)} on {pair.device}, {pair.weight_dtype}"
    if pair.device.type == "cpu":
        about += f", {threads} thread{'s' * (threads > 1)}"
        about += f", {pair.products}" if pair.products else ""
    return about


def load_arguments(pair: ModelPair, name: str, draft: str | None) -> dict[str, Any]:
    """The arguments of load_pair, for the page's snippet."""
    return {
        "pair": shown_name(name),
        "draft": draft and shown_name(draft),
        "device": pair.device.type,
        "dtype": pair.weight_dtype,
    }


def replay_page(options: argparse.Namespace) -> tuple[Any, str]:
    """Returns the page for recordings, and a description of them."""
    from ui.page.limits import Limits
    from ui.page.page import build
    from ui.recordings.shelf import asked

    offers = asked(options.replay)
    first = next(iter(offers.values())).recording.about
    about = f"a recording: {first}" if len(offers) == 1 else f"recordings: {', '.join(offers)}"
    return build(None, limits=Limits(), about=first if len(offers) == 1 else "", offers=offers), about


def launch(page: Any, about: str, options: argparse.Namespace, opened: Callable[[], None] = lambda: None) -> None:
    """Serve until interrupted; call `opened` once the page is up. Raises BassError for a bad address."""
    from bass_core import BassError
    from ui.page.page import launch_options

    address = host(options.host, os.environ)
    try:
        _, url, public = page.launch(
            server_name=address,
            server_port=options.port,
            share=options.share,
            auth=credentials(os.environ),
            prevent_thread_lock=True,
            quiet=True,
            **launch_options(),
        )
    except OSError as error:
        raise BassError(
            f"Cannot listen on {address}, port {options.port or '7860 or later'}: it is in use, or not an address "
            "of this machine; choose another with --port or --host."
        ) from error
    print(f"BASS races {about}: open {url}" + (f" or {public}" if public else ""), flush=True)
    opened()
    page.block_thread()


def shown_name(pair: str) -> str:
    """The pair's name as visitors see it; for a folder, the folder's name without its path."""
    return Path(pair).resolve().name if os.path.isdir(pair) else pair


def gpu_seconds(request: Any) -> int:
    """Upper bound of a race's GPU time in seconds; ZeroGPU reserves this much."""
    return min(120, 20 + request.max_new_tokens * request.batch_size // 20)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    options = parse(arguments)
    refusal = conflict()
    if refusal is None:
        # Printed first: importing torch and transformers takes seconds.
        print(LOADING, file=sys.stderr, flush=True)
        from bass_core import BassError

        try:
            serve(options)
        except BassError as error:
            refusal = str(error)
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
