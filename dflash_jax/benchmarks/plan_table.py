"""The figures of a plan as text."""

from dflash_jax.benchmarks import topologies
from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.chips import GIB


def table(figures: Figures) -> str:
    """The figures as text."""
    size = lambda n: f"{n / GIB:.2f} GiB" if n > GIB / 100 else f"{n / 2**20:.2f} MiB"
    axes = ", ".join(f"{name} {n}" for name, n in figures["mesh"].items() if n > 1)
    stored = "".join(f"   {key} in {how}" for key, how in figures.get("quantize", {}).items())
    source = "as compiled" if "argument_bytes" in figures else "as traced (for more: .[cuda-compiler])"
    count = figures["devices"]
    devices = "one device" if count == 1 else f"{count} devices"
    lines = ["   ".join(filter(None, [figures["topology"], devices, axes])) + stored, "", f"per device, {source}"]
    shown = figures.get("parts", {}) | figures
    for key in ("weight_bytes", "cache_bytes", "argument_bytes", "temporary_bytes", "updated_in_place_bytes"):
        if key in shown:
            lines.append(f"  {key.removesuffix('_bytes').replace('_', ' '):20} {size(shown[key])}")
    if "pages" in figures:
        tokens = figures["pages"] * figures["page"]
        lines.append(f"  {'KV cache pages':20} {figures['pages']} of {figures['page']} positions: {tokens} tokens")
    verdict = "fits" if figures["fits"] else "DOES NOT FIT"
    lines.append(f"  {'peak':20} {size(figures['peak_bytes'])} of {size(figures['chip_bytes'])}: {verdict}")
    if figures.get("requests_by_length"):
        found = ", ".join(f"{count} of {length:,}" for length, count in figures["requests_by_length"].items())
        lines.append(f"  {'requests at a time':20} {found} tokens, if no prompts are cached")
    if "constraint_bytes" in figures:
        tables = size(figures["constraint_bytes"])
        lines.append(f"  {'constraint tables':20} {tables} more, for requests with constraints")
    if "prefill_budget" in figures:
        lines.append(f"  {'prompts a step':20} {figures['prefill_budget']} tokens, read beside the rows that decode")
    counted = figures.get("parts", figures)
    if "flops" in counted and "model_flops" not in figures:
        accessed = size(counted["bytes_accessed"])
        lines.append(f"  {'operations a step':20} {counted['flops'] / 1e9:.1f} GFLOP, {accessed} read")
    if "model_flops" in figures:
        from dflash_jax.benchmarks.training_plan import lines as of_training

        lines += of_training(figures)
    if "kernels" in shown:
        where = f"in {shown['graphs']} CUDA graphs, with {shown['host_decisions']} decisions of the host"
        more = f"{shown['conditional_kernels']} under conditions"
        lines.append(f"  {'kernels a step':20} {shown['kernels']} {where}; {more}")
    if "draft_upkeep" in shown:
        share = 100 * shown["draft_upkeep"]
        lines.append(f"  {'draft cache update':20} {share:.1f}% more memory traffic in a step without speculation")
    one = figures.get("part_bytes", {}).get("verify of one token")
    for name, moved in figures.get("part_bytes", {}).items():
        share = f", {moved / one:.2f} times one token's" if moved and one else ""
        lines.append(f"  {'moved by ' + name:32} {size(moved) if moved else 'not known':>12}{share}")
    if one and topologies.parse_topology(figures["topology"])[0] in topologies.GPUS:
        lines.append("  (a program for a GPU does not say what it updates in place: caches count whole)")
    lines.append("")
    none = "   none" if figures["collectives"] is not None else "   not known without a compiler that writes them down"
    lines.append("collectives a step" + ("" if figures["collectives"] else none))
    collectives = figures["collectives"] or []
    for kind in dict.fromkeys(c["kind"] for c in collectives):
        found = [c for c in collectives if c["kind"] == kind]
        moved = sum(c["count"] * c["bytes"] for c in found)
        largest = max(c["bytes"] for c in found)
        count = sum(c["count"] for c in found)
        lines.append(f"  {count:4} x {kind:20} {size(moved):>12} in all, {size(largest)} the largest")
    if "least_step_seconds" in figures:
        milliseconds = 1e3 * figures["least_step_seconds"]
        lines += ["", f"least time of a step {milliseconds:.2f} ms (published bandwidth and FLOP rates)"]
    if "free_nodes" in figures:
        lines.append(
            f"trees of up to {figures['free_nodes']} nodes take no more time: a step is limited by memory bandwidth"
        )
    if "tau" in figures:
        lines.append(
            f"at tau {figures['tau']}: at most {figures['most_tokens_per_second']:.0f} tokens/s, all sequences"
        )
    return "\n".join(lines)
