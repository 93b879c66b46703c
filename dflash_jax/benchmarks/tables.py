"""The benchmark's figures as text."""

from dflash_jax.benchmarks.arguments import Figures


def table(figures: Figures) -> str:
    """The figures as text."""
    rows = [
        ("", "tokens/s", "tokens", "decode s"),
        *(
            (name, f"{side['tokens_per_second']:.1f}", str(side["tokens"]), f"{side['decode_seconds']:.2f}")
            for name, side in figures.items()
            if isinstance(side, dict) and "tokens_per_second" in side
        ),
    ]
    lines = ["  ".join([row[0].ljust(28), *(cell.rjust(10) for cell in row[1:])]) for row in rows]
    seconds = figures["step_seconds"]
    histogram = " ".join(f"{k}:{n}" for k, n in enumerate(figures["acceptance_histogram"]) if n)
    lines += [
        "",
        f"speedup {figures['speedup']:.2f}   tau {figures['tau']:.3f}   block {figures['draft']}   "
        f"equal outputs {figures['equal_outputs']}/{figures['samples']}",
        f"acceptance lengths   {histogram}",
        "acceptance per position   " + " ".join(f"{rate:.2f}" for rate in figures["acceptance_per_position"]),
        f"step ms at length {figures['step_length']}   "
        + "   ".join(f"{name} {1e3 * value:.2f}" for name, value in seconds.items()),
        f"fused step / its parts {figures['fused_step_over_parts']:.3f}   steps x step time / decode time   "
        + "   ".join(f"{name} {share:.3f}" for name, share in figures["device_loop_share"].items()),
    ]
    if "experts_hit" in figures:
        hit = "   ".join(f"{width} tokens {count:.1f}" for width, count in figures["experts_hit"].items())
        lines.append(f"experts hit per layer by a block of   {hit}")
    if "acceptance_by_category" in figures:
        lines.append("tau by category")
        for category, found in figures["acceptance_by_category"].items():
            tau = "-" if found["tau"] is None else f"{found['tau']:.3f}"
            lines.append(f"  {category or '(none)':24}{tau:>8}   {found['samples']} samples")
    if "correct" in figures:
        correct = "   ".join(f"{name} {count}" for name, count in figures["correct"].items())
        lines.append(f"correct answers of {figures['samples']}   {correct}")
    for name, side in figures.items():
        if isinstance(side, dict) and "tau_ratio" in side:
            ratio = f"this run's is {side['tau_ratio']:.3f} of it (at least {side['tau_ratio_at_least']:.3f})"
            lines.append(f"tau with {name.replace('_', ' ')} {side['tau']:.3f}   {ratio}")
    if "official" in figures:
        lines.append(
            f"speculative / official {figures['official']['speedup_over']:.2f}   autoregressive / transformers "
            f"{figures['transformers']['speedup_over']:.2f}   official tau {figures['official']['tau']:.3f}   "
            f"equal to official {figures['official']['equal_outputs']}/{figures['samples']}"
        )
    return "\n".join(lines)
