"""What the command lines share: options, loading what they name, progress."""

import argparse
import sys
from pathlib import Path
from typing import Any

LOG_PAUSE = 30.0  # seconds between two lines of progress where there is no terminal


def add_model_arguments(parser: argparse.ArgumentParser, *, bundled: bool = True) -> None:
    """Options of every command that loads a pair; `bundled` has one to fall back to."""
    default = " (default: the bundled pair)" if bundled else ""
    parser.add_argument(
        "--target",
        required=not bundled,
        metavar="DIR|ID",
        help=f"target checkpoint: directory or hub id{default}",
    )
    parser.add_argument("--drafter", metavar="DIR|ID", help="its DFlash drafter")
    add_mesh_argument(parser, "heads over the devices of a host as far as they divide, rows over the others")
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16; auto: float32 on CPU, else bfloat16"
    )


def add_mesh_argument(parser: argparse.ArgumentParser, auto: str) -> None:
    """`--mesh`; `auto` says what that is."""
    parser.add_argument(
        "--mesh",
        default="auto",
        metavar="AXES",
        help=f"devices, like data=2,model=4 (axes data, fsdp, model; -1 is the rest); auto: {auto} (default)",
    )


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that generates."""
    parser.add_argument("--max-new-tokens", type=int, default=256, help="per answer (default 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="in (0, 1]; 1 keeps every token (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps every token (default)")
    parser.add_argument("--min-p", type=float, default=0.0, help="in 0..1; 0 keeps every token (default)")
    parser.add_argument(
        "--block-size",
        type=_block_size,
        metavar="N|auto",
        help="draft slots per step, up to the checkpoint's (default); auto measures what pays, no speculation included "
        "(default of serve --input)",
    )
    parser.add_argument("--batch-size", type=int, default=1, help="rows decoded together (default 1)")
    parser.add_argument(
        "--proposals",
        choices=("coupled", "argmax", "independent"),
        default="coupled",
        help="how the drafter picks tokens at temperature > 0; never changes the answers",
    )


def _block_size(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number or auto, got {text!r}") from error


def load(args: argparse.Namespace) -> tuple[tuple[Any, Any], Any, Any]:
    """Loads what the arguments name: (target, drafter or None), text, and the defaults of a request."""
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    speculative = not getattr(args, "no_speculation", False)
    use_bundled_pair(args)
    if speculative and not args.drafter:
        raise ValueError("--drafter is needed to speculate; without one, say --no-speculation")
    from dflash_jax.decoding.sampling import check_sampling

    check_sampling(args.temperature, args.top_p, args.top_k, args.min_p)
    enable_compilation_cache()
    from dflash_jax.drafters.dflash import load_drafter
    from dflash_jax.infer.params import SamplingParams
    from dflash_jax.infer.text import Text
    from dflash_jax.target import load_target

    mesh = choose_mesh(args.mesh, args.target, args.drafter if speculative else None)
    drafter = load_drafter(args.drafter, dtype=args.dtype, mesh=mesh) if speculative else None
    target = load_target(args.target, dtype=args.dtype, mesh=mesh)
    if drafter:
        drafter.config.check_pair(target.config)
    text = Text(target.directory)
    stops = target.config.eos_token_ids
    if not stops and text.end_token is not None:
        stops = (text.end_token,)
    defaults = SamplingParams(
        args.max_new_tokens,
        args.temperature,
        args.top_p,
        args.top_k,
        args.min_p,
        stop_token_ids=stops,
    )
    return (target, drafter), text, defaults


def choose_mesh(text: str, target: str, drafter: str | None, *, training: bool = False) -> Any:
    """The mesh that `--mesh` names, or None for a single device.

    Several CPU devices are the same cores; they are used only where the mesh is named.
    """
    import jax

    from dflash_jax import checkpoint, models, sharding
    from dflash_jax.drafters.config import drafter_config
    from dflash_jax.mesh import make_mesh, parse_mesh

    if text != "auto":
        sizes = parse_mesh(text)
        return None if len(jax.devices()) == 1 else make_mesh(sizes)
    if len(jax.devices()) == 1 or jax.default_backend() == "cpu":
        return None
    if training:
        return make_mesh(parse_mesh("fsdp=-1"))
    raw = lambda source, what: checkpoint.read_json(checkpoint.resolve(source, what) / "config.json")
    configs: list[Any] = [models.target_config(raw(target, "target"))]
    if drafter:
        configs.append(drafter_config(raw(drafter, "drafter")))
    return make_mesh(sharding.auto_mesh(configs, len(jax.devices()), jax.local_device_count()))


def use_bundled_pair(args: argparse.Namespace) -> bool:
    """Fills in the bundled pair where no target is named, and returns whether it did.

    Raises:
        ValueError: a drafter is named without its target.
    """
    if args.target:
        return False
    if args.drafter:
        raise ValueError("--drafter needs its --target; with neither, the bundled pair is used")
    from dflash_jax.bundled import bundled_pair

    args.target, args.drafter = map(str, bundled_pair())
    return True


def make_engine(
    args: argparse.Namespace,
    pair: tuple[Any, Any],
    requests: list[Any],
    *,
    logprobs: int | None = None,
    growing: bool = False,
) -> Any:
    """An engine with room for the longest request, or for `--max-length`.

    Args:
        logprobs: alternatives that requests still unknown may ask for.
        growing: whether such requests may begin as others did, like the turns of a conversation.
    """
    from dflash_jax.infer.engine import Engine
    from dflash_jax.infer.prefixes import shared_chunks
    from dflash_jax.mesh import rows_of

    parts = rows_of(pair[0].mesh)
    length = getattr(args, "max_length", None)
    vocab_size, most = pair[0].config.vocab_size, pair[0].config.max_position_embeddings
    known = range(vocab_size)
    fit = [r for r in requests if r.prompt_token_ids and all(token in known for token in r.prompt_token_ids)]
    prompt = max((len(r.prompt_token_ids) for r in fit), default=1)
    if length is None:
        needed = max((len(r.prompt_token_ids) + max(r.params.max_new_tokens, 1) for r in fit), default=1)
        length = min(-(-needed // 256) * 256, most or needed)
    slots = -(-args.batch_size // parts) * parts
    chunk = 32 if requests and prompt <= 128 else 256  # short prompts spare compiling long chunks
    kept = getattr(args, "prefix_chunks", None)
    if kept is None:  # what is of use, and no more memory than the slots take
        kept = slots * length // chunk
        kept = kept if growing else min(kept, shared_chunks([r.prompt_token_ids for r in fit], chunk))
    try:
        return Engine(
            *pair,
            slots=slots,
            max_length=length,
            block_size=args.block_size if pair[1] else None,
            proposals=args.proposals,
            seed=getattr(args, "seed", 0),
            prefill_chunk=chunk,
            prefix_chunks=kept,
            logprobs=max((n for r in requests if (n := r.params.logprobs) is not None), default=logprobs),
        )
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"no memory for {args.batch_size} rows of {length} tokens; lower --max-length or --batch-size "
            f"({str(error).splitlines()[0]:.120})"
        ) from error


def warm_up(engine: Any) -> None:
    """Compiles, and says so."""
    print(f"compiling {engine.batch.programs} programs ...", file=sys.stderr)
    engine.warm_up()
    print(f"ready after {engine.stats.compile_seconds:.1f} s", file=sys.stderr)


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless the user has chosen a place or none."""
    import os

    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(home / "dflash_jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def progress_bar(total: int, unit: str, *, in_logs: bool = True) -> Any:
    """A bar on stderr: drawn twice a second on a terminal, twice a minute in a log or not there at all."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    pause = 0.5 if terminal else LOG_PAUSE
    rhythm: dict[str, Any] = {"mininterval": pause, "maxinterval": max(pause, 10.0)}
    return tqdm(total=total, unit=unit, file=sys.stderr, disable=not (terminal or in_logs), **rhythm)


def engine_rates(engine: Any) -> str:
    """Tokens per second and tau so far, for a progress bar."""
    if not engine.stats.steps:
        return ""
    rate = f"{engine.stats.tokens_per_second:.0f} tok/s"
    return f"{rate} tau {engine.stats.tau:.2f}" if engine.drafter else rate
